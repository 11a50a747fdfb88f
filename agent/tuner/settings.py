"""`TunerSettings`: all numbers of the tuner's decisions."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.agent.runtime_settings import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """Times are in seconds, and shares lie between 0 and 1."""

    # When the tuner looks.
    quick_s: float = 0.25
    """Seconds between two looks after the start, a change or a suspected event."""
    usual_s: float = 0.5
    """Seconds between two looks otherwise."""
    window_s: float = 3.0
    """Seconds over which the rates of the pipeline are measured."""
    settle_s: float = 3.0
    """Seconds after a change in which its stages may still show the old costs."""
    calm_s: float = 10.0
    """Seconds without a change or an event after which the candidates are compared less often."""
    seldom_s: float = 2.0
    """Seconds between two comparisons then."""
    first_s: float = 5.0
    """Seconds for which the first choice waits for stages that have reported no work."""

    # What a change is worth.
    draws: int = 96
    """How many times the costs are drawn from what is known of them."""
    price: float = 0.025
    """The price of a change, as a share of the rows. Each further visit of a setting doubles it."""
    trial_s: float = 2.0
    """Seconds until it shows that a change brings fewer rows, besides the time of its items."""
    trial_items: float = 3.0
    """Items of a changed stage until that shows."""
    start_s: float = 4.0
    """Seconds added if a stage moves to another back end."""
    least_horizon_s: float = 15.0
    """Costs are expected to stay for at least so long, and for as long as they have stayed."""
    most_horizon_s: float = 120.0
    """Costs are never expected to stay longer."""
    favour: float = 0.25
    """One candidate takes the costs to be as low as they are with this probability."""

    # When workers are given back.
    release_s: float = 3.0
    """Seconds for which workers must be unneeded. Each release makes this four times as long."""

    # What a wait for the interpreter's lock is.
    turn_s: float = 0.02
    """Seconds for which an item waits for a lock that is always held, in a stage that hardly holds it."""
    convoy: float = 0.05
    """The share of the lock's time that each further thread wastes which wants it."""
    free_wait_share: float = 0.15
    """The share of a wait that stays when nobody holds the lock, if most of it was for the lock."""

    def __post_init__(self) -> None:
        check_numbers(self)
