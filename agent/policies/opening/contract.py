"""The contract of a learned policy: `PolicyInput` → `InitialSetting`. The policy, its training and its evaluation
share it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreknowledge:
    """What is known of a pipeline before its first row. None: unknown."""

    row_bytes: float | None = None
    """The bytes of a row in memory, by the schema."""
    row_group_rows: int | None = None
    operators: Mapping[str, str] | None = None
    """Stage of transforms → `vectorised` or `python`. Vectorised or compiled code rarely holds the interpreter's lock;
    Python code holds it."""
    store: str | None = None
    """`local`, a disk of this machine, or `remote`, behind a network."""


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
            raise ValueError(
                f"seen: {self.seen.at} s is not after {self.begun.at} s, when the look began"
            )
        names = [stage.name for stage in self.seen.stages]
        if [stage.name for stage in self.begun.stages] != names or set(names) != set(
            self.limits.workers
        ):
            raise ValueError(
                f"stages: the looks and the limits have different stages: {names}, "
                f"{list(self.limits.workers)}"
            )
        self.limits.check(self.knobs)

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
    reason: str
    """One sentence: what the setting is based on, or which input is outside."""
    rows_per_s: float | None
    """The promised rate. None if an input is outside the training range. The setting must not be used then."""

    def __post_init__(self) -> None:
        if self.rows_per_s is not None and not 0 < self.rows_per_s < math.inf:
            raise ValueError(f"rows_per_s: {self.rows_per_s!r} is no rate")


class LearnedPolicy(Protocol):
    """Chooses initial settings, such as `sluice.agent.policies.opening.policy.NetworkPolicy`. The same input always
    gives the same setting."""

    @property
    def digest(self) -> str:
        """A short hash of its weights. Equal weights have equal digests."""

    def choose(self, given: PolicyInput) -> InitialSetting:
        """Returns the initial setting for this input."""
