"""What a Python worker made ready for one task, kept for its next ones: `features_of`.

For a spec like Criteo's it takes a third of a second to read the fitted state and to build the operators' tables. A
worker runs many tasks of one pass."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.etl.apply.features import Features
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FittedState, Packed


@dataclass(frozen=True, slots=True)
class _Made:
    packed: Packed
    ahead: bool
    state: FittedState
    features: Features


_last: list[_Made] = []  # of this process, which does one task at a time: one at most


def features_of(spec: Spec, packed: Packed, *, ahead: bool) -> tuple[FittedState, Features]:
    """The state that was sent to the workers, and the spec's operators over it: those of the last task, if that had the
    same `packed` state, which Spark keeps in a worker for all tasks of a pass. Another state takes its place."""
    if not _last or _last[0].packed is not packed or _last[0].ahead != ahead:
        _last.clear()
        state = FittedState.unpacked(spec.fitted_hash, packed)
        _last.append(_Made(packed, ahead, state, Features(spec, state, ahead=ahead)))
    return _last[0].state, _last[0].features
