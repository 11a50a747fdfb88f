"""Estimates how many cores other programs take, from the time that our threads wait for a core: `Contention`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.agent.costs.rates import PipelineRates

_NEGLIGIBLE = 0.02  # of a core: threads that use less tell nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """What other programs take of the cores. All threads that want a core are assumed to share the cores fairly.

    Our own threads also wait for each other. That is no contention."""

    others: float = 0.0
    """How many threads of other programs want a core on average."""
    cores: float
    """The cores that we get if the number of our threads is the number of cores plus `others`."""
    slow: float = 1.0
    """How many times longer our threads take than on free cores, if we run as many threads as there are cores."""

    @classmethod
    def of(cls, rates: PipelineRates, most: int | None = None) -> Contention:
        """Returns the contention during the interval of `rates`. `most`: on how many cores our threads may run."""
        running = rates.running
        wanting = rates.wanting
        quota = rates.cpu_quota if most is None else min(rates.cpu_quota, most)
        if running < _NEGLIGIBLE or quota <= 0 or wanting <= running:
            return cls(cores=quota)
        # With fair shares, every thread waits as long as ours do: `wanting / running`. If the idle cores are unknown,
        # the others are assumed to run on all cores that we leave. But a wait may also be chance if we want fewer cores
        # than there are.
        if rates.idle is None:
            others = max(0.0, quota * wanting / running - max(wanting, quota))
        else:
            others = max(0.0, quota - rates.idle - rates.cpu) * wanting / running
        return cls(
            others=others,
            slow=1 + others / quota,
            cores=max(running, quota * (quota + others) / (quota + 2 * others)),
        )
