"""The numbers by which the controller and its helpers tune a run, in one place: `RuntimeSettings`. What the planner
decides by is in `sluice.agent.planner_settings`."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.agent.planner_settings import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """A look is one snapshot that the controller takes. Shares lie between 0 and 1."""

    # When the controller looks, and how often it may change something.
    interval_s: float = 1.0
    """Seconds from one look to the next."""
    early: float = 0.9
    """Share of that interval after which a tick counts; an earlier one does nothing."""
    publish_s: float = 0.5
    """Seconds between two snapshots that a rank publishes for its host's agent."""
    changes_a_minute: int = 30
    """Changes within a minute after which the policy is not asked."""

    # When two looks can be compared.
    least_items: int = 2
    """Items that each busy worker has to finish, on average; of fewer, much of the work may lie outside."""
    idle: float = 0.05
    """Workers busy on average; where there are fewer, nobody waits for what the stage does."""
    overdue: float = 4.0
    """Times the time expected for those items, after which they are waited for no longer …"""
    overdue_s: float = 5.0
    """… plus so many seconds."""
    longest_s: float = 30.0
    """Seconds after which nothing is waited for any longer, as something may hang."""

    # What came of a change.
    window: int = 5
    """Looks over which a rate before or after a change is taken."""
    effect_after: int = 4
    """Looks after a change at which its effect is logged, if no other change came first."""
    settled_after: int = 10
    """Looks without a change after which a choice counts as settled."""
    compared_after: int = 3
    """Looks at a choice after which it may count as the best of a run."""
    as_good: float = 0.98
    """Share of the best rate from which on a later choice is preferred to the best."""

    # What no decision caused.
    ours: int = 8
    """Looks after a change of workers in which a row's cost may have changed by it."""
    other_limit: float = 0.05
    """Share of a memory limit by which it has to change; less is memory that other programs took."""

    # How jobs share a host's cores.
    starved: float = 0.1
    """Stall above which a job wants all the cores that it can get."""
    calm: int = 5
    """Looks without a stall after which a job claims no more than it needs: …"""
    claimed: float = 1.25
    """… so many times the cores that it uses …"""
    claim_step: float = 0.25
    """… rounded up to a multiple of this, as each change of a claim makes other jobs plan anew."""

    def __post_init__(self) -> None:
        check_numbers(
            self,
            times={"overdue", "claimed"},
            shares={"early", "as_good", "other_limit", "starved"},
        )


RUNTIME = RuntimeSettings()
