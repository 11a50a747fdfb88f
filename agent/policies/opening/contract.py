"""The contract of a learned policy: `PolicyInput` → `InitialSetting`. The policy, its teacher and its judge share
it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

STORES = ("local", "remote")
"""Where a table's files lie: on a disk of this machine, or behind a network."""
OPERATORS = ("vectorised", "python")
"""How a stage of transforms does its work: by vectorised or compiled code, which leaves the interpreter's lock alone
most of the time, or by Python that holds it."""


class PolicyInputError(ValueError):
    """An input or an opening that cannot be: its message names the field and the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnGroup:
    """The columns of one type."""

    count: int
    bytes_per_row: float
    """The bytes of a row in all of them, in memory."""

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.bytes_per_row < math.inf:
            raise PolicyInputError(
                f"ColumnGroup: {self.count} columns of {self.bytes_per_row} bytes a row are no columns"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreknowledge:
    """What is known of a pipeline before its first row. None: nobody said, and then the policy goes without it."""

    columns: Mapping[str, ColumnGroup] | None = None
    """The columns that are read, by their type's name (`int64`, `list<int64>`, …)."""
    operators: Mapping[str, str] | None = None
    """Of each stage of transforms that is known, one of OPERATORS; `python` if any of its functions is of that
    class."""
    store: str | None = None
    """One of STORES."""
    row_group_rows: int | None = None
    row_group_bytes: int | None = None
    """Its bytes in memory."""

    def __post_init__(self) -> None:
        if self.store is not None and self.store not in STORES:
            raise PolicyInputError(f"store: {self.store!r} is none of {', '.join(STORES)}")
        for stage, kind in (self.operators or {}).items():
            if kind not in OPERATORS:
                raise PolicyInputError(
                    f"operators of {stage!r}: {kind!r} is none of {', '.join(OPERATORS)}"
                )
        for name in ("row_group_rows", "row_group_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PolicyInputError(f"{name}: {value!r} is not a number from 1 up")
        for name in ("columns", "operators"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, MappingProxyType(dict(value)))

    @property
    def row_bytes(self) -> float | None:
        """The bytes of a row in memory, as the schema has it; None if no schema is known."""
        return (
            None
            if self.columns is None
            else sum(group.bytes_per_row for group in self.columns.values())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInput:
    """All that is known at the first look, some quarter of a second after the first batch, before any knob moved."""

    begun: Snapshot
    """The snapshot from which on is looked: the one at the start, or of the first batch."""
    seen: Snapshot
    """The first look. Memory, its limit and the cores are those of this snapshot."""
    knobs: Knobs
    """The knobs in force between the two."""
    limits: Limits
    known: Foreknowledge = field(default_factory=Foreknowledge)
    process_bytes: int | None = None
    """The bytes of one worker process, measured; None as long as none was started."""

    def __post_init__(self) -> None:
        if self.seen.at <= self.begun.at:
            raise PolicyInputError(
                f"seen: {self.seen.at} s is not after {self.begun.at} s, where the look began"
            )
        names = [stage.name for stage in self.seen.stages]
        if [stage.name for stage in self.begun.stages] != names or set(names) != set(
            self.limits.workers
        ):
            raise PolicyInputError(
                f"stages: the looks and the limits are not of one pipeline: {names}, "
                f"{list(self.limits.workers)}"
            )
        self.limits.check(self.knobs)
        if self.process_bytes is not None and self.process_bytes < 1:
            raise PolicyInputError(
                f"process_bytes: {self.process_bytes!r} is not a number from 1 up"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialSetting:
    """The setting that the policy chooses. `auto` checks afterwards whether it fits into memory."""

    knobs: Knobs
    """Workers and back ends of all stages, and both buffers, within the limits. What is fused stays fused."""
    inside: bool
    """Whether the input is within the training range. If not, the setting must not be used."""
    reason: str
    """One sentence: what it was chosen by, or what lies outside."""
    rows_per_s: float | None
    """The rate that is promised; None if the input lies outside."""

    def __post_init__(self) -> None:
        if self.inside != (self.rows_per_s is not None):
            raise PolicyInputError(
                f"rows_per_s: {self.rows_per_s!r}, where inside is {self.inside}: who opens promises "
                "a rate"
            )
        if self.rows_per_s is not None and not 0 < self.rows_per_s < math.inf:
            raise PolicyInputError(f"rows_per_s: {self.rows_per_s!r} is no rate")


class LearnedPolicy(Protocol):
    """Something that opens pipelines, such as `sluice.agent.policies.opening.policy.NetworkPolicy`, whose `in_use()`
    is None where there are no weights. It is pure: the same input, the same opening."""

    def choose(self, given: PolicyInput) -> InitialSetting:
        """The opening for what was seen."""
