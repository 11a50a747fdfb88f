"""`choose_lookup`: chooses how rows get their values from fitted tables, by the size of the tables."""

from __future__ import annotations

from sluice.etl.ops import Fitted
from sluice.etl.spec.spec import Learned, Spec
from sluice.etl.table.fitted_state import FileBackedState, FittedState

BROADCAST = "broadcast"
HELD = "held by each worker"
JOIN = "shuffle join"
VALUE_BYTES = 64
"""The memory of one value in a worker: slots of 12 bytes, a quarter to half full, and its text while they are made."""
_COLLECTED_BYTES = 128
"""The memory of one value on the driver, which sorts the values that it collects."""


def driver_limit(worker_bytes: int) -> int:
    """Returns the most values that the driver collects, if some may stay in files instead."""
    return max(1, worker_bytes // _COLLECTED_BYTES)


def choose_lookup(spec: Spec, state: FittedState, worker_bytes: int) -> dict[str, str]:
    """Returns how rows get their values from each fitted table. The driver broadcasts the tables that it collected. The
    others are in files. Workers load the smaller ones of these while they have memory, and the rest is joined."""
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
    """Returns whether another operator learns from the result. Workers then need the whole table to learn."""
    return any(
        isinstance(op, Fitted)
        for column, number in learned.users
        for op in column.ops[number + 1 :]
    )
