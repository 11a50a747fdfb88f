"""The contract of a learned policy: `PolicyInput` → `InitialSetting`. The policy, its training and its evaluation
share it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

STORES = ("local", "remote")
"""Where a table's files are: on a disk of this machine, or behind a network."""
OPERATORS = ("vectorised", "python")
"""How a stage of transforms works. Vectorised or compiled code rarely holds the interpreter's lock; Python code holds
it."""


class PolicyInputError(ValueError):
    """An invalid input or initial setting. The message names the field and the value."""


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
    """What is known of a pipeline before its first row. None: unknown."""

    columns: Mapping[str, ColumnGroup] | None = None
    """The columns that are read, by their type's name (`int64`, `list<int64>`, …)."""
    operators: Mapping[str, str] | None = None
    """Stage of transforms → one of OPERATORS. `python` if any of its functions is Python code."""
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

    def to_dict(self) -> dict[str, Any]:
        """Returns it as a dict for JSON. `from_dict` reads it back."""
        columns, operators = self.columns, self.operators
        return {
            "columns": None
            if columns is None
            else {kind: asdict(group) for kind, group in columns.items()},
            "operators": None if operators is None else dict(operators),
            "store": self.store,
            "row_group_rows": self.row_group_rows,
            "row_group_bytes": self.row_group_bytes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Foreknowledge:
        columns = values["columns"]
        if columns is not None:
            columns = {kind: ColumnGroup(**group) for kind, group in columns.items()}
        return cls(**{**values, "columns": columns})

    @property
    def row_bytes(self) -> float | None:
        """The bytes of a row in memory, by the schema. None if no schema is known."""
        return (
            None
            if self.columns is None
            else sum(group.bytes_per_row for group in self.columns.values())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInput:
    """All that is known at the first look, about a quarter of a second after the first batch. No knob has changed."""

    begun: Snapshot
    """The earlier snapshot: at the start, or at the first batch."""
    seen: Snapshot
    """The first look. The memory, its limit and the cores come from this snapshot."""
    knobs: Knobs
    """The knobs in force between the two."""
    limits: Limits
    known: Foreknowledge = field(default_factory=Foreknowledge)
    process_bytes: int | None = None
    """The measured bytes of one worker process. None until a process was measured."""

    def __post_init__(self) -> None:
        if self.seen.at <= self.begun.at:
            raise PolicyInputError(
                f"seen: {self.seen.at} s is not after {self.begun.at} s, when the look began"
            )
        names = [stage.name for stage in self.seen.stages]
        if [stage.name for stage in self.begun.stages] != names or set(names) != set(
            self.limits.workers
        ):
            raise PolicyInputError(
                f"stages: the looks and the limits have different stages: {names}, "
                f"{list(self.limits.workers)}"
            )
        self.limits.check(self.knobs)
        if self.process_bytes is not None and self.process_bytes < 1:
            raise PolicyInputError(
                f"process_bytes: {self.process_bytes!r} is not a number from 1 up"
            )

    @property
    def own_stages(self) -> list[str]:
        """The stages that have workers of their own."""
        return [stage.name for stage in self.seen.stages if stage.name not in self.knobs.fused]

    def is_movable(self, stage: str) -> bool:
        return self.limits.movable(stage, self.knobs.backend.get(stage))


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialSetting:
    """The setting that the policy chooses. `auto` checks afterwards whether it fits into memory."""

    knobs: Knobs
    """Workers and back ends of all stages, and both buffers, within the limits. Fused stages stay fused."""
    inside: bool
    """Whether the input is within the training range. If not, the setting must not be used."""
    reason: str
    """One sentence: what the setting is based on, or which input is outside."""
    rows_per_s: float | None
    """The promised rate. None if an input is outside."""

    def __post_init__(self) -> None:
        if self.inside != (self.rows_per_s is not None):
            raise PolicyInputError(
                f"rows_per_s: {self.rows_per_s!r} with inside={self.inside}: a setting needs a rate if and only if "
                "its input is inside"
            )
        if self.rows_per_s is not None and not 0 < self.rows_per_s < math.inf:
            raise PolicyInputError(f"rows_per_s: {self.rows_per_s!r} is no rate")


class LearnedPolicy(Protocol):
    """Chooses initial settings, such as `sluice.agent.policies.opening.policy.NetworkPolicy`. The same input always
    gives the same setting."""

    @property
    def digest(self) -> str:
        """A short hash of its weights. Equal weights have equal digests."""

    def choose(self, given: PolicyInput) -> InitialSetting:
        """Returns the initial setting for this input."""
