"""Workers that a stage may not have for a while, as a change that failed taught, or for thinning out: `Held`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.pressure import CONTENDED, Pressure
from agent.rates import Rates
from agent.service import between
from ingest.knobs import Knobs

if TYPE_CHECKING:
    from agent.policies.state import State

BENT = 0.75  # of a row's cost now was enough with fewer workers: they disturb each other
FORGIVE = 400  # snapshots for which a stage's failed change is not tried again
DOUBT = 30  # the same where others use the cores: they may have been the cause (doubled with each failure in a row)


@dataclass(frozen=True, slots=True)
class Held:
    """Workers that a stage may have, until that tick."""

    least: int
    most: int
    until: int
    slow: float = 0.0
    """How slow the cores were for us, if that was why, and `before`: the most it may have once they are much freer."""
    before: int = 0

    def eased(self, slow: float, tick: int) -> Held:
        """As the cores are now. That they are freer may be because there are fewer of us."""
        return Held(self.least, self.before, tick + DOUBT) if slow * CONTENDED < self.slow else self


def taught(state: State, before: Knobs, since: Rates) -> dict[str, Held]:
    """What a failed change taught. Stages that were grown until their workers disturbed each other may have no more
    than half-way to that, by ratio, and so may all if other programs may have been the cause; where there is none such,
    each stage that was moved stays on the side it was."""
    contended = Pressure.of(since).slow >= CONTENDED
    held, until = dict(state.held), state.tick + (min(FORGIVE, DOUBT * 2**state.failures) if contended else FORGIVE)
    grown = {n: (before.workers[n], now) for n, now in state.knobs.workers.items() if now > before.workers[n]}
    bent = {n: between(then, now) for n, (then, now) in grown.items()
            if state.services[n].points and state.services[n].busy_s(now) * BENT > state.services[n].busy_s(then)}
    for name, most in (bent or {n: between(*both) if contended else both[0] for n, both in grown.items()}).items():
        held[name] = Held(state.limits.workers[name][0], most, until)
    for name, now in state.knobs.workers.items():
        if now < before.workers[name]:
            held[name] = Held(before.workers[name], state.limits.workers[name][1], until)
    return held
