"""`RuntimeSettings`: the times and thresholds of the controller. `tuner/settings.py` has those of the tuner."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from sluice.common.number_checks import is_number, is_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """A look is one snapshot that the controller takes. Shares lie between 0 and 1."""

    # When the controller looks, and how often it may change something.
    interval_s: float = 1.0
    """Seconds from one look to the next, if the policy does not ask for it sooner, and between two metrics."""
    early_share: float = 0.9
    """A look that comes before this share of the time until it is skipped."""
    publish_s: float = 0.5
    """Seconds between two snapshots that a rank publishes for its host's agent."""
    changes_a_minute: int = 30
    """After this many changes within a minute the policy is not asked."""

    # How the effect of a change is measured.
    fresh_s: float = 1.0
    """Seconds after a change in which rates may still be those of the knobs before."""
    window_s: float = 4.0
    """Seconds over which a rate before or after a change is measured, if enough items end in them."""
    enough_items: int = 2
    """Items of each busy worker that are enough for a rate."""
    longest_s: float = 30.0
    """Items are waited for no longer, because something may hang."""
    settled_s: float = 10.0
    """Seconds without a change after which a setting counts as settled."""
    compared_looks: int = 3
    """Metrics at a setting after which it may count as the best of a run."""
    as_good_share: float = 0.98
    """A later setting with this share of the best rate is preferred to the best."""

    # What counts as an incident.
    limit_change_share: float = 0.05
    """Share of a memory limit by which it must change. Smaller changes come from other programs."""

    def __post_init__(self) -> None:
        check_numbers(self)


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


RUNTIME = RuntimeSettings()
