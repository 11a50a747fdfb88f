"""Estimates how many cores other programs take, from the time that our threads wait for a core: `Contention`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice.agent.costs.rates import PipelineRates

_NEGLIGIBLE = 0.02  # of a core: threads that use less tell nothing
_FREE = 0.5  # idle cores: nobody takes them
_WAITS = 1.2  # times the cores that threads get: with fewer wanted, they hardly wait
_TELLS = (
    1.15  # times the cores that a fair share would bring more threads: with less, nothing shows
)


@dataclass(frozen=True, slots=True)
class Crowd:
    """What our threads wanted and got of the cores for a while, in one setting."""

    wanting: float
    running: float
    others: float
    """Threads of other programs, if shares were fair."""
    at: float = 0.0
    """When."""

    def fair(self, wanting: float) -> float:
        """Returns the cores that so many of our threads would get if shares are fair."""
        mine = self.wanting / (self.wanting + self.others)
        return self.running / mine * wanting / (wanting + self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """What other programs take of the cores. All threads that want a core are assumed to share the cores fairly, until
    more threads of ours have brought no more cores: then we have a fixed share, as in a control group.

    Our own threads also wait for each other. That is no contention."""

    others: float = 0.0
    """How many threads of other programs want a core on average."""
    cores: float
    """The cores that we get if the number of our threads is the number of cores plus `others`."""
    slow: float = 1.0
    """How many times longer our threads take than on free cores, if we run as many threads as there are cores."""

    @classmethod
    def of(
        cls, rates: PipelineRates, earlier: Sequence[Crowd] = (), most: int | None = None
    ) -> Contention:
        """Returns the contention during the interval of `rates`.

        `earlier`: in other settings, with the same cores. `most`: on how many cores our threads may run."""
        if most is not None:
            rates = replace(rates, cpu_quota=min(rates.cpu_quota, most))
        now = cls._of_fair_shares(rates)
        if rates.idle is not None and rates.idle > _FREE:
            return now
        crowds = [*earlier, Crowd(rates.wanting, rates.running, now.others)]
        share = _fixed_share([crowd for crowd in crowds if crowd.wanting > _WAITS * crowd.running])
        if share is None:
            return now
        return cls(others=max(0.0, rates.cpu_quota - share), cores=max(share, rates.running))

    @classmethod
    def _of_fair_shares(cls, rates: PipelineRates) -> Contention:
        running = rates.running
        wanting = rates.wanting
        quota = rates.cpu_quota
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


def _fixed_share(crowds: Sequence[Crowd]) -> float | None:
    """Returns the cores that we get however many threads want them. None: nothing shows that there is such a share."""
    if len(crowds) < 2:
        return None
    few = min(crowds, key=lambda crowd: crowd.wanting)
    many = max(crowds, key=lambda crowd: crowd.wanting)
    fair = few.fair(many.wanting)
    if fair < _TELLS * few.running or many.running > (few.running * fair) ** 0.5:
        return None
    return max(crowd.running for crowd in crowds)
