"""What could be done at this moment instead of the planner's choice: `candidates`. Pure.

The planner's own choice comes first. Any choice is then treated like a change of the planner's: it is measured, and
taken back if it did harm. Each candidate comes with the numbers by which it is judged: `stages` has a row for each
stage, so that a pipeline of any length can be judged, and `whole` has those of the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.policies.planner.explain import moves
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.policies.planner.state import PlannerState
from sluice.agent.tunable import Reason
from sluice.ingest.knobs import Knobs
from sluice.ingest.stats import Snapshot

KINDS = ("planner", "hold", "half", "bold", "latest", "lean", "probe", "switch", "buffers")
STAGE_INPUTS = 13
WHOLE_INPUTS = 16 + len(KINDS)
_FULL = 0.7  # of the memory limit: from here on buffers may shrink early
_PROBE = 1.5  # times the workers of the busiest stage
_CHANGES = {"half": "grow", "bold": "grow", "latest": "grow", "lean": "release", "probe": "probe", "switch": "switch",
            "buffers": "memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One choice that could be made, and the planner's state afterwards."""

    kind: str
    knobs: Knobs
    state: PlannerState
    reason: Reason
    stages: np.ndarray
    whole: np.ndarray


def candidates(planner: Planner, snapshot: Snapshot, state: PlannerState) -> list[Candidate]:
    """The planner's choice and, once every stage is known, the others that differ from it and from each other.

    While a change of the planner's is on trial there are no others: a harmful one would not be taken back."""
    knobs, after, reason = planner.decide(snapshot, state)
    seen = rates(state.last, snapshot) if state.last is not None else None
    look = planner.look(after, seen) if seen is not None else None
    known = look is not None and len(look.services) == len(state.services)
    if seen is None or look is None or not known or seen.rows_per_s <= 0 or state.trial is not None:
        return [Candidate(kind="planner", knobs=knobs, state=after, reason=reason, stages=np.zeros((1, STAGE_INPUTS)),
                          whole=np.zeros(WHOLE_INPUTS))]
    look = replace(look, knobs=state.knobs)  # as it is now, not as the planner has just decided
    inputs = _Inputs(look, seen, state, after, knobs)
    found = [Candidate(kind="planner", knobs=knobs, state=after, reason=reason, stages=inputs.stages(knobs),
                       whole=inputs.whole("planner", knobs))]
    calm = after.undecided(state)
    for kind, other in _others(look, seen, state.knobs, knobs, snapshot):
        if any(other == one.knobs for one in found):
            continue
        if kind == "hold":
            text, then = f"the planner's change is left alone: {moves(other, knobs)}", calm
        else:
            text = f"left the planner's choice ({kind}): {moves(state.knobs, other)}"
            then = planner.begin(replace(calm, trial=None), other, _CHANGES[kind], seen, look.rate(other.workers))
        found.append(Candidate(
            kind=kind, knobs=other, state=then, stages=inputs.stages(other), whole=inputs.whole(kind, other),
            reason=Reason(text=text, bottleneck=reason.bottleneck, details=dict(reason.details),
                          predicted_rows_per_s=look.rate(other.workers))))
    return found


def _others(look: Forecast, seen: PipelineRates, now: Knobs, chosen: Knobs,
            snapshot: Snapshot) -> Iterator[tuple[str, Knobs]]:
    """The kind and knobs of each other candidate, without those that memory would not hold."""
    yield "hold", now
    free = {name: look.limits.workers[name] for name in look.services}
    fixed = {name: (now.workers[name], now.workers[name]) for name in look.services}
    between = {n: round(math.sqrt(count * chosen.workers[n])) for n, count in now.workers.items()}
    options = [("half", replace(chosen, workers=between)), ("bold", look.best(free, fewest=False)[0]),
               ("latest", _as_of(look, seen).best(free, fewest=False)[0]), ("lean", look.best(free, fewest=True)[0])]
    busiest = max(look.services, key=lambda n: seen.stages[n].busy / now.workers[n] if n in seen.stages else 0.0)
    most = look.limits.workers[busiest][1]
    options.append(("probe", now.with_workers(**{busiest: min(most, math.ceil(_PROBE * now.workers[busiest]))})))
    others = [b for b in look.limits.backends_of(busiest) if b != look.services[busiest].backend]
    if others:
        options.append(("switch", replace(now, backend={**now.backend, busiest: others[0]})))
    if look.memory(now) > _FULL * look.memory_limit:
        options.append(("buffers", look.best(fixed, fewest=True, tight=True)[0]))
    for kind, option in options:
        knobs = look.limits.clamp(option)
        if kind in ("lean", "buffers") or look.fits(knobs):
            yield kind, knobs


def _as_of(look: Forecast, seen: PipelineRates) -> Forecast:
    """The forecast if every row cost what the latest one did: faster than learning where a workload has just
    changed."""
    services = dict(look.services)
    for name, service in look.services.items():
        stage = seen.stages.get(name)
        if stage is not None and stage.rows_per_s > 0 and stage.busy > stage.core_wait:
            busy_s = (stage.busy - stage.core_wait) / stage.rows_per_s
            off = min(8.0, max(1 / 8, busy_s / service.busy_s(stage.workers)))
            services[name] = replace(service, points={n: p.scaled(off, off) for n, p in service.points.items()})
    return replace(look, services=services)


class _Inputs:
    """What is known at this moment, as numbers from about −3 to 3; ratios are logarithms."""

    def __init__(self, look: Forecast, seen: PipelineRates, before: PlannerState, after: PlannerState,
                 chosen: Knobs) -> None:
        self._look, self._seen, self._before, self._after, self._chosen = look, seen, before, after, chosen
        self._now = look.rate(look.knobs.workers)

    def stages(self, knobs: Knobs) -> np.ndarray:
        look, seen, rows = self._look, self._seen, []
        for name, service in look.services.items():
            now, then, chosen = (k.workers[name] for k in (look.knobs, knobs, self._chosen))
            stage = seen.stages.get(name)
            busy, starved, blocked = (stage.busy / now, stage.starved / now, stage.blocked / now) if stage else (0,) * 3
            point = service.describe(now)
            rows.append([
                busy, starved, blocked, _log(now / max(1.0, seen.cpu_quota)), _log(then / now), _log(then / chosen),
                _log(look.capacity(name, now) / self._now), _log(look.capacity(name, then) / self._now),
                point["spread"], point["residual"], math.log1p(service.age) / 4, service.waiting(now),
                _log(then / max(1, service.most_seen))])
        return np.array(rows)

    def whole(self, kind: str, knobs: Knobs) -> np.ndarray:
        look, seen, before = self._look, self._seen, self._before
        total = look.knobs.total_workers
        values = [
            seen.stall, seen.cpu / max(1e-9, seen.cpu_quota), seen.memory_used / seen.memory_limit,
            look.memory(knobs) / look.memory_limit, _log(self._now / seen.rows_per_s),
            _log(look.rate(knobs.workers) / self._now), _log(look.rate(self._chosen.workers) / self._now),
            _log(knobs.total_workers / total), _log(knobs.total_workers / max(1.0, seen.cpu_quota)),
            math.log1p(before.age) / 4, math.log1p(before.tick) / 4, before.failures / 4,
            float(before.trial is not None), min(3.0, look.slow - 1),
            float(self._after.tick < self._after.quiet_until), _log(look.cores_rate(knobs.workers) / self._now)]
        return np.array([*values, *(float(kind == k) for k in KINDS)])


def _log(ratio: float) -> float:
    return math.log(min(20.0, max(0.05, ratio)))
