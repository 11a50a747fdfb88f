"""`RuntimeSettings`: the times and thresholds of the controller. `planner_settings.py` has those of the planner."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.agent.planner_settings import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """A look is one snapshot that the controller takes. Shares lie between 0 and 1."""

    # When the controller looks, and how often it may change something.
    interval_s: float = 1.0
    """Seconds from one look to the next."""
    early_share: float = 0.9
    """A look that comes before this share of the interval is skipped."""
    publish_s: float = 0.5
    """Seconds between two snapshots that a rank publishes for its host's agent."""
    changes_a_minute: int = 30
    """After this many changes within a minute the policy is not asked."""

    # When two looks can be compared.
    idle_workers: float = 0.05
    """A stage with fewer busy workers, on average, is not waited for."""
    overdue_ratio: float = 4.0
    """Waiting ends after this many times the expected time for those items, plus `overdue_s`."""
    overdue_s: float = 5.0
    """Seconds added to that time."""
    longest_s: float = 30.0
    """Waiting always ends after this many seconds, because something may hang."""

    # How the effect of a change is measured.
    window_looks: int = 5
    """Looks over which a rate before or after a change is measured."""
    effect_looks: int = 4
    """Looks after a change at which its effect is logged, if no other change came first."""
    settled_looks: int = 10
    """Looks without a change after which a setting counts as settled."""
    compared_looks: int = 3
    """Looks at a setting after which it may count as the best of a run."""
    as_good_share: float = 0.98
    """A later setting with this share of the best rate is preferred to the best."""

    # What counts as an event that no decision caused.
    own_effect_looks: int = 8
    """Looks after a change of workers in which it may have changed the cost of a row."""
    limit_change_share: float = 0.05
    """Share of a memory limit by which it must change. Smaller changes come from other programs."""

    def __post_init__(self) -> None:
        check_numbers(self)


RUNTIME = RuntimeSettings()
