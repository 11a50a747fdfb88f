"""The interfaces of the agent: it sees a pipeline as a `Tunable`, and a `Policy` chooses the knobs.

The real pipeline, the simulator and the fakes of the tests are Tunables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot


@runtime_checkable
class Tunable(Protocol):
    """Something with knobs. The controller calls `snapshot()`, decides, and calls `apply(knobs)`, and nothing else."""

    def snapshot(self) -> Snapshot:
        """Returns the counters since the start. It takes less than a millisecond. Any thread may call it."""

    def apply(self, knobs: Knobs) -> None:
        """Puts the knobs in force while running: no rebuild, no lost or repeated row, no change of order.

        Raises KnobError for knobs outside `limits`, and then changes nothing."""

    @property
    def limits(self) -> Limits:
        """The range of each knob. It may change with the machine."""

    @property
    def knobs(self) -> Knobs:
        """The knobs in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a policy chose its knobs, for the log and the report."""

    text: str
    """One sentence: `decode is the bottleneck; decode 2 → 4: 5,100 rows/s expected, 2,400 now`."""
    bottleneck: str | None = None
    """The stage that limits the rate, or `consumer` if the trainer does. None if it is not known yet."""
    predicted_rows_per_s: float | None = None
    """The rate that the policy expects. The controller logs the measured rate."""
    details: dict[str, Any] = field(default_factory=dict)
    """The numbers behind the sentence, for JSON."""
    choice: Mapping[str, Any] | None = None
    """A choice among candidates, for JSON: `chosen`, and `candidates` with their values."""
    incident: Mapping[str, str] | None = None
    """What the policy noticed at this look that no decision caused: a `text`, and the `stage` whose cost changed."""
    proposal: Knobs | None = None
    """The knobs that the policy would choose, if it only proposes changes, as `shadow` does."""


class Policy(ABC):
    """Chooses knobs. `decide` is pure: it uses no clock, thread, file or randomness outside its arguments.

    The other methods are optional: for policies that say when to look, learn, or explain themselves."""

    name: str

    @abstractmethod
    def initial(self, limits: Limits, knobs: Knobs) -> Any:
        """Returns the state before the first snapshot."""

    @abstractmethod
    def decide(self, snapshot: Snapshot, state: Any) -> tuple[Knobs, Any, Reason]:
        """Returns the knobs from now on, the next state, and the reason."""

    def next_look_s(self, state: Any) -> float | None:
        """Returns the seconds until the next decision, if sooner than usual. None: as usual."""
        return None

    def made_of(self) -> Mapping[str, Any]:
        """Returns what its decisions depend on besides snapshots and state, as plain data: weights, the machine."""
        return {}

    def learned(self, state: Any) -> Mapping[str, Any] | None:
        """Returns what it has learned, as plain data for `recall` in another process. None: nothing."""
        return None

    def recall(self, state: Any, learned: Mapping[str, Any]) -> Any:
        """Returns a state with what was learned before. None if the policy cannot use it."""
        return None

    def explain(self, state: Any) -> dict[str, Any] | None:
        """Returns details for the end of a run, for JSON. None if the last reason is enough."""
        return None
