"""`Contention`: how much of the machine other programs take, by how long our threads wait for a core. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.agent.costs.rates import PipelineRates
from sluice.agent.planner_settings import DEFAULT, PlannerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Other programs' use of the cores, if all threads that want a core share them fairly. Our own crowding is left
    out."""

    others: float = 0.0
    """How many threads of other programs want a core on average."""
    cores: float
    """The cores that we get if we want one for as many threads as the others do, and as there are cores."""
    slow: float = 1.0
    """How many times slower than alone a thread runs, if as many of ours as there are cores want one."""

    @classmethod
    def of(cls, rates: PipelineRates, settings: PlannerSettings = DEFAULT) -> Contention:
        running = rates.running
        wanting = rates.wanting
        quota = rates.cpu_quota
        if running < settings.min_running_cores or quota <= 0 or wanting <= running:
            return cls(cores=quota)
        # Fair shares: all threads wait as long as ours do, wanting / running. Where nobody says what the others run,
        # they run all that we do not; but if we want fewer cores than there are, a wait may be chance as well.
        if rates.idle is None:
            others = max(0.0, quota * wanting / running - max(wanting, quota))
        else:
            others = max(0.0, quota - rates.idle - rates.cpu) * wanting / running
        return cls(
            others=others,
            slow=1 + others / quota,
            cores=max(running, quota * (quota + others) / (quota + 2 * others)),
        )
