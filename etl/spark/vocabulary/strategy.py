"""Chooses how rows meet what was learned: `choose_lookup`, by size alone. Nothing here needs Spark."""

from __future__ import annotations

from sluice.etl.ops import Fitted
from sluice.etl.spec.spec import Learned, Spec
from sluice.etl.table.fitted_state import FileBackedState, FittedState

BROADCAST = "broadcast"
HELD = "held by each worker"
JOIN = "shuffle join"
VALUE_BYTES = 64  # of a looked-up value: slots of 12 bytes, a quarter to half full, and its text while they are made
_COLLECTED_BYTES = 128  # bytes of a value on the driver, which sorts what it collects
_HEAD_BYTES = (
    1024  # a worker that does not hold a vocabulary holds one value for so many bytes it might
)


def driver_limit(worker_bytes: int) -> int:
    """The number of values that the driver collects at most, if some may stay in files instead."""
    return max(1, worker_bytes // _COLLECTED_BYTES)


def hot_values(worker_bytes: int) -> int:
    """The number of a joined vocabulary's values that workers hold all the same: the most frequent, which would crowd a
    task."""
    return max(1, worker_bytes // _HEAD_BYTES)


def choose_lookup(spec: Spec, state: FittedState, worker_bytes: int) -> dict[str, str]:
    """Returns how rows meet each fitted table. The driver has the tables that it collected, and sends them; of the
    others, which are kept in files, workers hold the smaller ones as long as there is room, and rows meet the rest by a
    join."""
    free = worker_bytes - sum(
        table.num_rows * VALUE_BYTES
        for table in state.tables.values()
        if not isinstance(table, FileBackedState)
    )
    found = {}
    for learned in sorted(
        spec.fitted, key=lambda x: (not needed_whole(x), state.kept(x.key).num_rows, x.key)
    ):
        table = state.kept(learned.key)
        if not isinstance(table, FileBackedState):
            found[learned.key] = BROADCAST
            continue
        held = needed_whole(learned) or table.num_rows * VALUE_BYTES <= free
        free -= table.num_rows * VALUE_BYTES if held else 0
        found[learned.key] = HELD if held else JOIN
    return dict(sorted(found.items()))


def needed_whole(learned: Learned) -> bool:
    """Whether another operator learns from its result: workers then apply it while they fit."""
    return any(
        isinstance(op, Fitted)
        for column, number in learned.users
        for op in column.ops[number + 1 :]
    )
