"""`PlannerSettings`: all thresholds and times of the planner. An ablation passes other values."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from sluice.common.number_checks import is_number, is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Time is counted in ticks: one a second, and one for a look that had to wait longer for items to be finished.
    "Times" are ratios of at least 1; shares lie between 0 and 1."""

    # When to change something.
    min_gain_ratio: float = 1.08
    """A change must promise at least this many times the present rate. A removal may cost as much."""
    growth_from_one: int = 16
    """A stage with one worker may grow to this many workers at once."""
    growth_factor: int = 8
    """A stage may grow to this many times the most workers that were ever measured."""
    min_busy_share: float = 0.3
    """The cost of a stage is ignored while a smaller share of its workers is busy."""
    probe_busy_share: float = 0.7
    """A stage with at least this share of its workers busy is tried with numbers of workers whose cost is unknown."""

    # What remote workers may cost.
    remote_core_price: float = 0.01
    """A remote core must bring this share of the rows that the trainer would take. A trainer with a GPU costs
    about as much as a hundred cores."""
    restart_price_share: float = 0.1
    """Unneeded remote workers are released when keeping them has cost this share of starting them again."""

    # What a change on trial has to bring.
    negligible_share: float = 0.02
    """A smaller share counts as nothing: of the trainer's time, of the cores, of a rate."""
    min_gain: float = 0.03
    """Smallest gain of a growing change. With less gain the change is undone. A removal that loses less is clear."""
    settle_ticks: int = 2
    """Ticks before a clear gain is judged."""
    patience_ticks: int = 5
    """Ticks before any other effect is judged, and in which workers must be unneeded. Rates last one tick longer."""
    certain_ticks: int = 3
    """Looks after which a cost is settled. As many are added for workers that must first start and import."""
    quick_look_s: float = 0.25
    """Seconds between two looks before the first change, or after a look at which a row was dearer."""

    # What follows from a failed change.
    cap_ticks: int = 400
    """Ticks for which a failed change of a stage is not tried again, nor more requests to a store that refused some. No
    pause is longer, and no start of requested workers is waited for longer."""

    # What a setting would bring, and what it needs.
    headroom_ratio: float = 1.05
    """Planned capacity over the needed capacity, because averages hide unevenness. A smaller slow-down is no reason."""
    full_share: float = 0.9
    """Share of the memory limit that a setting may fill. No core counts as free if at least this share is in use."""
    held_item_ratio: float = 1.5
    """Times an item's bytes that a worker holds: its output, and a part of its input."""
    prefetch_batches: float = 4.0
    """Batches that may wait for the trainer."""
    buffer_share: float = 0.25
    """Share of the memory limit that one buffer may take."""
    search_steps: int = 6
    """Halvings of a search for the best rate, and smaller sets of remote workers that are considered."""
    step_down: float = 0.75
    """Factor of each step down before that search has a lower end. Fewer spare workers stay unless rows are gained."""

    # How the cost of a stage is learned.
    min_items: int = 2
    """Items of a stage, or of each busy worker between two looks. An interval with fewer is extended."""
    learning_weight: float = 0.25
    """Weight of a new observation in an average, or once a point is settled."""
    dearer_ratio: float = 1.5
    """This many times as much is clearly more: a cost than expected, threads than cores."""
    rise_ratio: float = 1.18
    """So is a cost that is this many times higher than a settled one. The rate of its stage falls by 15 %."""
    leap_ratio: float = 2.0
    """A cost that rises by this factor at the same number of workers was not caused by our change. With more workers,
    there may be a kink in between."""
    forget_factor: float = 0.99
    """The largest item seen shrinks by this factor with each observation."""
    min_wait_share: float = 0.1
    """Share of the cost that is waiting which no change removes."""
    mostly_share: float = 0.5
    """At least this share counts as most: of the rows, of a promised gain, of the time of a lock, of a cost. New
    processes, or an initial setting, may not take most of the free memory."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.settle_ticks > self.patience_ticks:
            raise ValueError(
                f"settle_ticks: {self.settle_ticks} is above patience_ticks, {self.patience_ticks}"
            )

    @property
    def memory_alarm(self) -> float:
        """Memory is given back at once when a larger share of the memory limit is in use."""
        return (1 + self.full_share) / 2

    @property
    def own_effect_ticks(self) -> int:
        """Ticks after a change in which events count as its effect."""
        return 3 * self.patience_ticks


def check_numbers(settings: Any) -> None:
    """Raises ValueError, by name, for a field that is no number above 0, or is out of the range of its kind: whole
    numbers and ratios are at least 1, and shares at most 1."""
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        whole = isinstance(setting.default, int)
        least = 1 if whole or setting.name.endswith("_ratio") else 0
        most = 1.0 if setting.name.endswith("_share") else math.inf
        fits = (is_whole if whole else is_number)(value, least, most)
        if not fits or not value:
            raise ValueError(
                f"{setting.name}: {value!r} is not a {'whole ' * whole}number {_RANGES[least, most]}"
            )


_RANGES = {(0, math.inf): "above 0", (1, math.inf): "of at least 1", (0, 1.0): "from 0 to 1"}
DEFAULT = PlannerSettings()
