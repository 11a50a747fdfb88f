"""The agent's whole view of what it tunes: `Tunable`. The live pipeline, the simulator and the fakes implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


@runtime_checkable
class Tunable(Protocol):
    """Something with knobs. A loop calls `snapshot()`, decides, and calls `apply(knobs)`; there is no other contact."""

    def snapshot(self) -> Snapshot:
        """What happened since the start. It is cheap (well under a millisecond) and may be called from any thread."""

    def apply(self, knobs: Knobs) -> None:
        """Puts the knobs in force while running: no rebuild, no lost or repeated row, no change of order.

        Raises KnobError for what is outside `limits`, and then changes nothing."""

    @property
    def limits(self) -> Limits:
        """The range of each knob. It may change with the machine."""

    @property
    def knobs(self) -> Knobs:
        """The knobs in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a policy chose what it chose: for the log, the report and a person."""

    text: str
    """One sentence: `read is the bottleneck (0.97 busy); 2 → 4 workers, predicted 1.8×`."""
    bottleneck: str | None = None
    """The stage that bounds the rate, `consumer` if the trainer does, None if not known yet."""
    predicted_rows_per_s: float | None = None
    """The rate that the policy expects of its choice; the controller logs the rate that came."""
    details: dict[str, Any] = field(default_factory=dict)
    """Numbers behind the sentence, JSON-ready."""
    proposal: Knobs | None = None
    """The knobs that a policy which changes nothing would choose, such as `shadow`."""


class Policy(ABC):
    """Something that chooses knobs. `decide` is pure: no clock, thread, file or randomness but what is in its
    arguments. The other methods are for policies that want to be asked sooner, learn, or explain themselves."""

    name: str

    @abstractmethod
    def initial(self, limits: Limits, knobs: Knobs) -> Any:
        """The state before the first snapshot."""

    @abstractmethod
    def decide(self, snapshot: Snapshot, state: Any) -> tuple[Knobs, Any, Reason]:
        """The knobs to have from now on (possibly those in force), the next state, and why."""

    def next_look_s(self, state: Any) -> float | None:
        """Seconds until it wants to be asked again, if that is sooner than usual; None: as usual."""
        return None

    def opened(self, state: Any) -> Mapping[str, Any] | None:
        """How it opened the pipeline, and what came of it, JSON-ready: a `text` for a person, and a `record` without
        names to learn from; None if it opens nothing."""
        return None

    def learned(self, state: Any) -> Mapping[str, Any] | None:
        """What it has learned, as plain data for `recall` in another process; None if it learns nothing."""
        return None

    def recall(self, state: Any, learned: Mapping[str, Any]) -> Any:
        """A state that knows what was learned before; None if it has no use for that."""
        return None

    def explain(self, state: Any) -> dict[str, Any] | None:
        """What it knows at the end of a run, JSON-ready; None if its last reason says all."""
        return None
