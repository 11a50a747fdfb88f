"""Collects what a loader knows of its pipeline before the first row, for the learned policy: `foreknowledge`."""

from __future__ import annotations

from sluice.agent.choice.observation import Foreknowledge
from sluice.agent.tunable import Tunable
from sluice.ingest.knobs import FETCH


def foreknowledge(loader: Tunable) -> Foreknowledge:
    """Returns the kind of store.

    Whether a function is Python code shows when it runs (`Snapshot.lock_held_s`)."""
    return Foreknowledge(store="remote" if FETCH in loader.limits.workers else "local")
