"""The numbers by which the planner decides, in one place: `PlannerSettings`. An ablation hands over others."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Time is counted in ticks: one a second, and one for a look that had to wait longer for items to be finished.
    "Times" are ratios of at least 1; shares lie between 0 and 1."""

    # What is worth a change.
    worth: float = 1.08
    """Times the present rate that a change has to promise."""
    growth: int = 16
    """Workers to which a stage with one worker may grow at once: more would be a guess."""
    further: int = 8
    """Times the most workers ever seen to which a stage may grow."""
    careful: int = 2
    """The same where other programs use the cores as well."""
    matters: float = 0.3
    """Share of a stage's workers busy below which its cost makes no difference."""
    lately: float = 0.25
    """Weight of the latest interval in an average."""
    crowd: float = 1.5
    """Times the running threads that want a core, from which workers are taken away …"""
    slim: float = 0.9
    """… if as many as this share, or fewer, would do."""
    memory_alarm: float = 0.95
    """Share of the memory limit in use at which memory is given back at once."""
    window: int = 6
    """Ticks over which rates are taken."""
    busiest: float = 0.7
    """Share of its workers busy from which a stage is tried with numbers of workers whose cost is not known."""
    spare: int = 5
    """Ticks in a row that must show workers to spare before some are given back."""
    spare_workers: float = 0.15
    """Share of all workers: fewer to spare are given back only if that brings …"""
    spare_gain: float = 1.02
    """… so many times the rows …"""
    spare_kept: float = 0.999
    """… and never if less than this share of them would be left."""

    # What workers elsewhere are worth.
    core_price: float = 0.01
    """Share of the rows that the trainer would take that a core elsewhere has to bring: a trainer with a GPU costs
    about as much as a hundred of them."""
    cheaper: int = 8
    """How many smaller fleets are looked at."""
    regret: float = 0.1
    """Times what calling workers elsewhere again would cost that keeping them without need may cost before they go."""

    # What a change on trial has to bring.
    smooth: float = 0.02
    """Stall up to which the trainer counts as fed."""
    least_gain: float = 0.03
    """Least gain of a rise; with less it is undone."""
    least_kept: float = 0.93
    """Share of the rate that a release must keep."""
    clear: float = 0.3
    """A gain above this is clear, however much was hoped for …"""
    clear_share: float = 0.5
    """… and so is one above this share of the gain that was hoped for."""
    fulfilled: float = 0.8
    """Share of the gain hoped for from which on it came as promised."""
    clear_kept: float = 0.97
    """Share of the rate that a release must keep if it is to be judged early."""
    crash: float = 0.5
    """Share of the rows before; with less, a change is undone at once."""
    settle: int = 2
    """Ticks before a clear gain is judged …"""
    patience: int = 5
    """… and before anything else is."""
    hurt: int = 3
    """Ticks before a change that does harm is undone, if no other program takes the cores."""
    harm: float = 0.95
    """Share of the rate before below which a change does harm."""
    start_up: int = 3
    """Ticks more for workers that have to start and import first, or more if the first of them took more."""
    glance_s: float = 0.25
    """Seconds between two looks while the first process of a stage is waited for …"""
    first_process: int = 15
    """… and ticks for which it is; others follow once it was weighed."""
    arrival: int = 120
    """Ticks for which workers elsewhere may start before what called them is judged without them."""

    # What follows from a failed change.
    forgive: int = 400
    """Ticks for which a stage's failed change is not tried again."""
    doubt: int = 30
    """The same where other programs may have been the cause (doubled with each failure in a row)."""
    pause: int = 4
    """Ticks after a failed change in which nothing is tried (doubled with each failure in a row …"""
    pause_doublings: int = 8
    """… so many times at most)."""

    # What an opening has to bring.
    opened: int = 1
    """Ticks before an opening is judged."""
    trusted: float = 0.85
    """Share of what the planner's own choice promises that an opening is held against."""
    apart: float = 1.15
    """Times the workers of some stage from which on an opening differs from the planner's own choice."""

    # What other programs take of the cores.
    least_running: float = 0.02
    """Cores in use below which waits for a core say nothing."""
    contended: float = 1.3
    """Times slower than with free cores from which on other programs matter."""
    freer: float = 0.5
    """Share of what the others slowed us down by: with less, the cores have become freer."""
    worth_saying: float = 1.05
    """Times slower from which on a reason mentions them."""
    saturated: float = 0.92
    """Share of the cores in use from which on none counts as free."""

    # What a setting would bring, and what it takes.
    headroom: float = 1.05
    """Capacity over what is needed, for the unevenness that averages hide."""
    memory_target: float = 0.9
    """Share of the memory limit that a choice may fill."""
    process_share: float = 0.6
    """Share of the free memory that new processes may take at once, and an opening with all that it starts."""
    handover_s: float = 20e-6
    """Processor seconds that an item costs from one stage's workers to the next one's."""
    in_hand: float = 1.5
    """Times an item's bytes that a worker holds: its output, and part of its input."""
    read_ahead_items: float = 1.0
    """Items that a reader may have finished and waiting."""
    prefetch_batches: float = 4.0
    """Batches that may wait for the trainer."""
    lean: float = 0.5
    """Share of what buffers want that they get …"""
    worth_lean: float = 1.05
    """… if workers in their place bring so many times the rows."""
    buffer_share: float = 0.25
    """Share of the memory limit that one buffer wants at most."""
    halvings: int = 6
    """How many times the range is halved in which the best rate is searched …"""
    lower: float = 0.75
    """… after steps down by this factor."""

    # What a stage on another back end, or fused, would bring.
    holds: float = 0.5
    """Cores that a stage computes on at least if it is to delay others by a lock."""
    little: float = 0.1
    """Cores that a stage computes on at least if it is to have a part in that."""
    alone: float = 1.15
    """Cores that a stage computes on at most, as those who need a lock do not compute side by side."""
    waiting: float = 1.0
    """Workers of other stages that wait for a store or a lock, on average, at least."""

    # How the cost of a stage is learned.
    least_items: int = 2
    """Items of an interval; with fewer it goes on, as they say little."""
    learning: float = 0.25
    """Weight of a new observation once a point is settled."""
    drift: float = 1.5
    """Times off from which on a cost is a surprise; surprises add up (a cumulative sum, each way)."""
    slack: float = 0.1
    """Change of the cost's logarithm that is no surprise …"""
    clip: float = 0.8
    """… the largest surprise …"""
    alarm: float = 1.7
    """… and the sum that means that the workload has changed."""
    leap: float = 2.0
    """Times as dear, with as many workers as before, from which on no change of ours can be the cause."""
    forget: float = 0.99
    """Factor by which the largest item seen fades with each observation."""
    flat: float = 0.98
    """Share of the rate: two settings that are so near are bounded by something else, also between them."""
    edge: float = 1.0
    """Power by which costs rise more steeply than below where this is taken for an edge, not for a bend."""
    settled: int = 3
    """Observations of a setting after which it no longer moves by chance alone …"""
    trend: float = 0.05
    """… and the change of its cost's logarithm, beyond what is chance, from which on the whole curve moves along."""
    steep: float = 2.0
    """Times dearer with more workers: there may be a kink before."""
    relieved: float = 1.15
    """Times the cost with fewest workers: where a row is dearer, a lock may have been the cause."""
    least_wait: float = 0.1
    """Share of the cost: waiting that no stage gets rid of."""
    locked: float = 1.5
    """Times dearer with more workers, because of waiting: they wait for each other."""
    mostly: float = 0.5
    """Share of a cost, or of what made it dearer, from which on waiting explains it."""

    def __post_init__(self) -> None:
        check_numbers(self, times=_TIMES, shares=_SHARES)
        for name, above in (
            ("settle", "patience"),
            ("slack", "clip"),
            ("memory_target", "memory_alarm"),
        ):
            if getattr(self, name) > getattr(self, above):
                raise ValueError(
                    f"{name}: {getattr(self, name)!r} is above {above}, {getattr(self, above)!r}"
                )

    @property
    def ours(self) -> int:
        """Ticks after a change in which events count as its effect."""
        return 3 * self.patience


def check_numbers(settings: Any, *, times: Collection[str], shares: Collection[str]) -> None:
    """Raises ValueError, by name, for a field that is no number above 0, or is out of its range: whole numbers and
    those named in `times` are at least 1, `shares` at most 1."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        whole = isinstance(one.default, int)
        least, most = (
            (1 if whole or one.name in times else 0),
            (1.0 if one.name in shares else math.inf),
        )
        fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not (fits and math.isfinite(value) and 0 < value <= most and value >= least):
            raise ValueError(
                f"{one.name}: {value!r} is not a {'whole ' * whole}number {_RANGES[least, most]}"
            )


_TIMES = {
    "worth",
    "crowd",
    "contended",
    "headroom",
    "in_hand",
    "worth_lean",
    "drift",
    "steep",
    "relieved",
    "locked",
    "spare_gain",
    "worth_saying",
    "apart",
    "leap",
}
_SHARES = {
    "matters",
    "lately",
    "slim",
    "memory_alarm",
    "smooth",
    "least_gain",
    "least_kept",
    "crash",
    "harm",
    "saturated",
    "memory_target",
    "process_share",
    "lean",
    "buffer_share",
    "learning",
    "forget",
    "flat",
    "least_wait",
    "busiest",
    "freer",
    "spare_workers",
    "spare_kept",
    "clear_share",
    "clear_kept",
    "trusted",
    "fulfilled",
    "lower",
    "mostly",
    "core_price",
}
_RANGES = {(0, math.inf): "above 0", (1, math.inf): "of at least 1", (0, 1.0): "from 0 to 1"}
DEFAULT = PlannerSettings()
