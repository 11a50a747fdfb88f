"""What the tuner knows at a look: `TunerState`. Pure: `take_in` returns the state with one more snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.costs.remote_work import at_work
from sluice.agent.tunable import Reason
from sluice.agent.tuner.lock import LockModel
from sluice.agent.tuner.settings import TunerSettings
from sluice.agent.tuner.stage_model import StageModel
from sluice.agent.tuner.trials import Trials
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_LOCK_S = 0.2  # at least, between two looks at who holds the lock
_WAITS_S = 1.0  # over which waits for the lock are measured
_THROTTLED_S = 120.0  # for which no more requests go to a store that refused some
_WORKS = 0.25  # of a stage's workers: with less at work, a dearer row is no event
_DEMAND_S, _DEMAND_BATCHES = 1.0, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerState:
    """All that is known, and what was done."""

    limits: Limits
    knobs: Knobs
    """The knobs in force."""
    stages: Mapping[str, StageModel]
    lock: LockModel
    looks: tuple[Snapshot, ...] = ()
    """The looks of the last seconds."""
    began: float = 0.0
    """When the first look was."""
    changed_at: float | None = None
    chosen_at: float = 0.0
    """When candidates were last compared."""
    stayed: Reason | None = None
    """Why nothing was changed then."""
    started_at: float = 0.0
    """When workers were last starting."""
    before: tuple[Knobs, ...] = ()
    """Earlier settings, the latest first."""
    trials: Trials = field(default_factory=Trials)
    event_at: float = 0.0
    """When something last changed that no decision caused."""
    event: str = ""
    """What it was. Empty: the controller says it."""
    event_stage: str = ""
    suspects: bool = False
    """Whether a busy stage may have become dearer. The next look tells."""
    demands: tuple[tuple[float, float], ...] = ()
    """(when, rows a second that the trainer took while it did not wait), of the last seconds."""
    other_cpu_s: float = 0.0
    """Processor seconds a row outside the stages, when that was last measured. Mostly the trainer takes them."""
    most_asking: int | None = None
    """The most requests to a store that has refused some."""
    most_asking_until: float = 0.0
    lean_since: float | None = None
    """Since when workers are unneeded."""
    releases: int = 0
    _demand_from: Snapshot | None = None
    _lock_from: Snapshot | None = None
    _reported: Snapshot | None = None

    @classmethod
    def of(cls, limits: Limits, knobs: Knobs) -> TunerState:
        """Returns the state before the first look."""
        knobs = limits.complete(limits.clamp(knobs))
        return cls(
            limits=limits,
            knobs=knobs,
            stages={
                n: StageModel(name=n, backend=knobs.backend.get(n, "thread"))
                for n in limits.workers
            },
            lock=LockModel.of(limits),
        )

    @property
    def last(self) -> Snapshot:
        return self.looks[-1]

    @property
    def since(self) -> float:
        """When the last change, event or start of workers was."""
        return max(self.changed_at or self.began, self.event_at, self.started_at)

    def recent(self) -> PipelineRates | None:
        """Returns the rates since the last change, over some seconds at most. None: nothing to compare yet."""
        looks = self.looks
        if self.changed_at is not None:
            own = tuple(w for w in looks if w.at >= max(self.changed_at, self.started_at))
            looks = own if len(own) > 1 else looks[-2:]
        return rates(looks[0], looks[-1]) if len(looks) > 1 else None


def take_in(state: TunerState, snapshot: Snapshot, settings: TunerSettings) -> TunerState:
    """Returns the state with all that a look shows."""
    if snapshot.elsewhere:
        counted = snapshot
        if state._reported is not None and state.looks:
            counted = at_work(snapshot, state._reported, state.last)
        state, snapshot = replace(state, _reported=snapshot), counted
    if not state.looks or not _is_later(state.last, snapshot):
        began = state.began if state.looks else snapshot.at
        state = replace(state, looks=(snapshot,), began=began, _lock_from=snapshot)
        return replace(state, stages={n: _observed(state, n) for n in state.stages})
    last = state.last
    if snapshot.cpu_quota != last.cpu_quota:
        # Rates with another number of cores cannot be compared.
        state = replace(
            state,
            looks=(last,),
            event_at=snapshot.at,
            event="",
            trials=state.trials.forget(),
        )
    if snapshot.throttled > last.throttled:
        state = replace(
            state,
            most_asking=state.knobs.workers[state.limits.asking],
            most_asking_until=snapshot.at + _THROTTLED_S,
        )
    if any(stage.starting for stage in snapshot.stages):
        state = replace(state, started_at=snapshot.at)
    kept = tuple(w for w in state.looks if snapshot.at - w.at <= settings.window_s) or (last,)
    state = _watch_lock(replace(state, looks=(*kept, snapshot)))
    return _watch_demand(_watch_stages(state, settings))


def _is_later(before: Snapshot, now: Snapshot) -> bool:
    """Whether two looks saw the same pipeline one after the other."""
    same = [s.name for s in before.stages] == [s.name for s in now.stages]
    return same and now.at > before.at and now.rows >= before.rows


def _watch_lock(state: TunerState) -> TunerState:
    """Returns the state with what the last second tells of the lock's holders."""
    now, then = state.last, state._lock_from
    moved = then is None or any(
        a.backend != b.backend or b.starting for a, b in zip(then.stages, now.stages, strict=False)
    )
    if moved or then is None:
        return replace(state, _lock_from=now)
    if now.at - then.at < _LOCK_S:
        return state
    return replace(state, lock=state.lock.observe(then, now), _lock_from=now)


def _watch_stages(state: TunerState, settings: TunerSettings) -> TunerState:
    """Returns the state with what the look tells of each stage's cost."""
    now, before = state.last, state.looks[-2]
    changed = state.changed_at if state.changed_at is not None else -1.0
    start = next(
        (w for w in state.looks if w.at >= changed and now.at - w.at <= _WAITS_S), state.looks[-2]
    )
    measured = rates(start if start is not now else before, now)
    waits = state.lock.waits(measured, now, settings) if measured is not None else {}
    held = (measured.lock or 0.0) if measured is not None else 0.0
    stages = {n: _observed(state, n, waits.get(n, 0.0), held) for n in state.stages}
    suspects, known = False, state.stages
    for seen in now.stages:
        if seen.name not in stages:
            continue
        stage, old = stages[seen.name], known[seen.name]
        busy_s = seen.busy_s - before.stage(seen.name).busy_s
        works = busy_s >= _WORKS * seen.workers * (now.at - before.at)
        suspects |= stage.is_doubtful and works
        if stage.epoch <= old.epoch or not old.known or stage.backend != old.backend or not works:
            continue
        # Our own change loads the cores and the lock, which slows stages that compute.
        own = changed >= 0 and now.at - changed < settings.settle_s
        if not own or not _is_shared(stage, waits.get(seen.name, 0.0), measured, settings):
            word = "dearer" if stage.factor > 1 else "cheaper"
            times = stage.factor if stage.factor > 1 else 1 / stage.factor
            state = replace(
                state,
                event_at=now.at,
                event=f"rows became {times:.2g} times {word} in {seen.name}",
                event_stage=seen.name,
                trials=state.trials.forget(),
                releases=0,
                lean_since=None,
            )
    return replace(state, stages=stages, suspects=suspects)


def _is_shared(
    stage: StageModel, waited: float, measured: PipelineRates | None, settings: TunerSettings
) -> bool:
    """Whether a load of the cores or of the lock may have slowed a stage as much as it was."""
    added_s = stage.item_rows * math.exp(stage.seen[-1].log_s) * (1 - 1 / stage.factor)
    lock = 0.0 if measured is None else measured.lock or 0.0
    by_turns = stage.backend != "process" and abs(added_s) < 2 * settings.turn_s * lock
    return stage.cpu_share > 0.5 or waited > 0.1 or by_turns


def _observed(
    state: TunerState, name: str, lock_share: float = 0.0, held: float = 0.0
) -> StageModel:
    """Returns a stage's model after the last look."""
    stage = state.stages[name]
    seen = next((s for s in state.last.stages if s.name == name), None)
    if seen is None:
        return stage
    by_turns = seen.backend != "process" and state.lock.is_bystander(name)
    return stage.observe(seen, state.last.at, lock_share, held if by_turns else 0.0)


def _watch_demand(state: TunerState) -> TunerState:
    """Returns the state with the rows that the trainer takes while it does not wait."""
    now = state.last
    start = state._demand_from or now
    seconds, batches = now.at - start.at, now.batches - start.batches
    if state._demand_from is not None and not (
        (seconds >= _DEMAND_S and batches >= _DEMAND_BATCHES) or seconds > 5 * _DEMAND_S
    ):
        return state
    demands = state.demands
    compute_s = now.consumer_compute_s - start.consumer_compute_s
    if now.rows > start.rows:
        recent = tuple(d for d in demands if now.at - d[0] < 5 * _DEMAND_S)
        took = (now.at, (now.rows - start.rows) / max(compute_s, 1e-12))
        demands = (*recent, took) if compute_s > 1e-4 else ()
    return replace(state, demands=demands, _demand_from=now)
