"""`offline-grid`: measures settings of a grid, one after the other, and keeps the best, as a patient person would.

The grid has four levels a stage: 1, a quarter, half and all of the cores. Of its settings 32 at most are measured,
spread evenly, together with the diagonal; what the search costs counts as in a real run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.stopwatch import Stopwatch
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_MOST = 32
_SETTLE, _WINDOW = 1, 1


def grid(limits: Limits, cores: float) -> list[dict[str, int]]:
    """The settings to measure."""
    levels = sorted({max(1, round(cores * share)) for share in (0, 0.25, 0.5, 1)})
    names, size = list(limits.workers), len(levels)
    total = size ** len(names)
    # A stride prime to the total visits the grid evenly, and each setting once.
    stride = next(
        s for s in range(max(1, int(total * 0.618)), 2 * total + 2) if math.gcd(s, total) == 1
    )
    numbers = [i * stride % total for i in range(min(total, _MOST - size))]
    diagonal = [sum(level * size**i for i in range(len(names))) for level in range(size)]
    return [
        {n: levels[number // size**i % size] for i, n in enumerate(names)}
        for number in dict.fromkeys([*diagonal, *numbers])
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridState:
    limits: Limits
    knobs: Knobs
    left: tuple[Knobs, ...] | None = None
    """Settings still to measure, the first of them in force; None: not begun."""
    best: Knobs | None = None
    best_rate: float = -1.0
    watch: Stopwatch = field(default_factory=Stopwatch)


class OfflineGrid(Policy):
    name = "offline-grid"

    def initial(self, limits: Limits, knobs: Knobs) -> GridState:
        return GridState(limits=limits, knobs=limits.clamp(knobs))

    def decide(self, snapshot: Snapshot, state: GridState) -> tuple[Knobs, GridState, Reason]:
        if state.left is None:
            settings = tuple(
                state.limits.resized(state.knobs, w) for w in grid(state.limits, snapshot.cpu_quota)
            )
            return (
                settings[0],
                replace(state, left=settings),
                Reason(text=f"{len(settings)} settings to measure"),
            )
        if not state.left:
            assert state.best is not None
            return (
                state.best,
                state,
                Reason(text="the best of the grid", predicted_rows_per_s=state.best_rate),
            )
        watch, seen = state.watch.look(snapshot, settle=_SETTLE, window=_WINDOW)
        if seen is None:
            return (
                state.left[0],
                replace(state, watch=watch),
                Reason(text="measuring a setting of the grid"),
            )
        if seen.rows_per_s > state.best_rate:
            state = replace(state, best=state.left[0], best_rate=seen.rows_per_s)
        assert state.left is not None
        left = state.left[1:]
        state = replace(state, left=left, watch=Stopwatch())
        chosen = left[0] if left else state.best
        assert chosen is not None
        return chosen, state, Reason(text=f"{len(left)} settings left to measure")
