"""What each candidate is worth: `ValueNetwork`.

    Observation, candidates ──features──▶ LookInputs ──answer──▶ one Value for each candidate

The value of a candidate is its gain over staying: the rows of the next seconds that it brings more, as a share of the
most that any candidate brings. The rows that the change itself costs are counted. The network has the same weights for
all stages and candidates. Stages are numbers relative to the present rate, so a pipeline that is a thousand times
faster looks the same. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from sluice.agent.choice.candidates import NAMES, Candidate
from sluice.agent.choice.observation import Observation
from sluice.agent.weights import digest, read

SHIPPED = Path(__file__).with_name("values.safetensors")
HIDDEN = 48
NETWORKS = 3
"""The value is the mean of this many networks, and their difference is a part of the spread."""
_FAR = 4.0  # the largest input
_CHANGE_PRICE = 0.01  # of the rows: what a change costs beyond its measured loss
UNBOUNDED = 1e15
"""The rows a second that a forecast without a bound counts as."""

STAGE_INPUTS = (
    "has reported work",
    "share of its workers busy",
    "share starved",
    "share blocked",
    "processor time in its work",
    "waits for a core",
    "cores",
    "workers",
    "capacity",
    "capacity with twice the workers",
    "capacity with half the workers",
    "most workers seen",
    "numbers of workers seen",
    "spread of its cost",
    "its workers wait for each other",
    "runs in processes",
    "can be moved",
    "is known to be Python",
    "is known to be vectorised",
    "memory of its items",
    "memory of a process",
    "is the first",
    "is the last",
    "is the bottleneck",
    "most workers allowed",
)
CHANGE_INPUTS = (
    "workers of the candidate",
    "capacity with the candidate's workers",
    "beyond the workers seen",
    "moves to processes",
    "moves to threads",
)
PIPELINE_INPUTS = (
    "stall",
    "stall of the last look",
    "rate of the last look",
    "cores in use",
    "cores",
    "other programs slow it",
    "memory in use",
    "memory needed at most",
    "work is held back",
    "what the trainer would take",
    "what the cores would allow",
    "the trainer is the bottleneck",
    "the cores are the bottleneck",
    "stages",
    "ticks of the run",
    "ticks since the change",
    "no change yet",
    "a change is on trial",
    "a trial may go up",
    "the planner pauses",
    "workers are starting",
    "rate to that before the change",
    "rate to the best",
    "changes of the last minute",
    "ticks since an event",
    "workers",
    "the store is known to be remote",
    "forecast of the present setting",
    "waiting workers",
    "the interpreter's lock is held",
    "how far the lock is held is known",
)
CANDIDATE_INPUTS = (
    *NAMES,
    "early",
    "forecast to the rate",
    "forecast to the present forecast",
    "promise to the rate",
    "has a promise",
    "memory",
    "more memory",
    "workers in all",
    "workers to the cores",
    "most growth of a stage",
    "most loss of a stage",
    "was in force",
    "its rate then",
    "ticks since then",
    "read-ahead bytes",
    "prefetch bytes",
    "memory of new processes",
)


class Value(NamedTuple):
    """What a candidate is worth, and how far that may be wrong."""

    gain: float
    spread: float


class LookInputs(NamedTuple):
    """The network's inputs at one look: stage × STAGE_INPUTS, PIPELINE_INPUTS, candidate × stage × CHANGE_INPUTS, and
    candidate × CANDIDATE_INPUTS."""

    stages: ndarray
    pipeline: ndarray
    changes: ndarray
    candidates: ndarray


def _ratio(value: float, base: float) -> float:
    """Returns the logarithm of a ratio, for rates that may be infinite."""
    ratio = min(value, UNBOUNDED) / max(min(base, UNBOUNDED), 1e-6)
    return min(3.0, max(-3.0, math.log(max(ratio, 1e-9))))


def features(seen: Observation, candidates: Sequence[Candidate]) -> LookInputs:
    names = [stage.name for stage in seen.snapshot.stages]
    return LookInputs(
        np.array([_stage(seen, name, i, len(names)) for i, name in enumerate(names)], np.float32),
        np.array(_pipeline(seen), np.float32),
        np.array(
            [[_change(seen, candidate, name) for name in names] for candidate in candidates],
            np.float32,
        ),
        np.array([_candidate(seen, candidate) for candidate in candidates], np.float32),
    )


def _stage(seen: Observation, name: str, place: int, count: int) -> list[float]:
    knobs = seen.knobs
    forecast = seen.forecast
    limits = seen.state.limits
    workers, measured = knobs.workers[name], seen.recent.stages.get(name)
    cost = forecast.costs.get(name)
    backend = knobs.backend.get(name, "thread")
    kind = (seen.known.operators or {}).get(name)
    rate, memory = seen.recent.rows_per_s, seen.forecast.memory_limit
    busy = max(measured.busy, 1e-6) if measured else 1e-6
    learned = [0.0] * 9
    if cost is not None:
        learned = [
            _ratio(forecast.capacity(name, workers), rate),
            _ratio(forecast.capacity(name, 2 * workers), rate),
            _ratio(forecast.capacity(name, max(1, workers // 2)), rate),
            _ratio(cost.most_seen, workers),
            min(len(cost.points), 5) / 5,
            min(1.0, math.sqrt(next(iter(cost.points.values())).variance)),
            float(cost.locked),
            min(_FAR, cost.item_bytes * workers / memory),
            min(_FAR, cost.process_bytes / max(1.0, forecast.free_bytes)),
        ]
    return [
        float(cost is not None),
        *(
            [
                min(1.5, measured.busy / workers),
                min(1.5, measured.starved / workers),
                min(1.5, measured.blocked / workers),
                min(1.5, measured.cpu / busy),
                min(1.5, measured.core_wait / busy),
                min(_FAR, measured.cpu),
            ]
            if measured
            else [0.0] * 6
        ),
        math.log(workers) / 3,
        *learned[:7],
        float(backend == "process"),
        float(limits.movable(name, backend)),
        float(kind == "python"),
        float(kind == "vectorised"),
        *learned[7:],
        float(place == 0),
        float(place == count - 1),
        float(forecast.bottleneck() == name),
        math.log(limits.workers[name][1]) / 3,
    ]


def _change(seen: Observation, candidate: Candidate, name: str) -> list[float]:
    before, after = seen.knobs, candidate.knobs
    count, cost = after.workers[name], seen.forecast.costs.get(name)
    was, kind = before.backend.get(name, "thread"), after.backend.get(name, "thread")
    if cost is None:
        capacity = beyond = 0.0
    else:
        capacity = _ratio(seen.forecast.capacity(name, count), seen.recent.rows_per_s)
        beyond = _ratio(count, max(1, cost.most_seen))
    return [
        _ratio(count, before.workers[name]),
        capacity,
        beyond,
        float(kind == "process" != was),
        float(was == "process" != kind),
    ]


def _pipeline(seen: Observation) -> list[float]:
    state = seen.state
    recent = seen.recent
    latest = seen.latest
    forecast = seen.forecast
    effects, rate = seen.effects, seen.recent.rows_per_s
    bottleneck, quota = forecast.bottleneck(), max(latest.cpu_quota, 0.05)
    trial, best = state.trial, seen.effects.best
    waiting = sum(max(0.0, s.busy - s.cpu - s.core_wait) for s in recent.stages.values())
    return [
        recent.stall,
        latest.stall,
        _ratio(latest.rows_per_s, rate),
        min(_FAR, recent.cpu / quota),
        math.log(quota) / 3,
        min(_FAR, forecast.slow - 1),
        latest.memory_used / max(1, latest.memory_limit),
        min(_FAR, forecast.memory(seen.knobs) / max(1.0, forecast.most_bytes)),
        float(seen.snapshot.held_back > 0),
        _ratio(forecast.demand, rate),
        _ratio(forecast.cores_rate(seen.knobs.workers), rate),
        float(bottleneck == "consumer"),
        float(bottleneck == "cores"),
        len(seen.knobs.workers) / 9,
        math.log10(state.tick + 0.25),
        min(state.age, 20.0) / 10,
        float(state.unchanged),
        float(trial is not None),
        float(trial is not None and trial.rises),
        float(state.tick < state.quiet_until),
        min(_FAR, sum(stage.starting for stage in seen.snapshot.stages) / 4),
        _ratio(rate, effects.rate_before) if effects.rate_before else 0.0,
        _ratio(rate, best.rows_per_s) if best else 0.0,
        sum(tick > state.tick - 60 for tick in effects.changes) / 4,
        2.0 if effects.event is None else min(20.0, state.tick - effects.event) / 10,
        _ratio(seen.knobs.total_workers, quota),
        float(seen.known.store == "remote"),
        _ratio(forecast.rate(seen.knobs.workers), rate),
        min(_FAR, waiting / quota),
        recent.lock or 0.0,
        float(recent.lock is not None),
    ]


def _candidate(seen: Observation, candidate: Candidate) -> list[float]:
    before, after, forecast = seen.knobs, candidate.knobs, seen.forecast
    rate, most = seen.recent.rows_per_s, max(1.0, forecast.most_bytes)
    grown = [_ratio(count, before.workers[name]) for name, count in after.workers.items()]
    needed, now = forecast.memory(after), forecast.memory(before)
    was, workers = seen.effects.of(after), after.total_workers
    processes = sum(
        count
        for name, count in after.workers.items()
        if after.backend.get(name) == "process" != before.backend.get(name)
    )
    size = max((cost.process_bytes for cost in seen.state.services.values()), default=0)
    free = max(1.0, forecast.free_bytes)
    return [
        *(float(candidate.name == name) for name in NAMES),
        float(candidate.early),
        _ratio(candidate.rows_per_s, rate),
        _ratio(candidate.rows_per_s, forecast.rate(before.workers)),
        _ratio(candidate.promised, rate) if candidate.promised else 0.0,
        float(candidate.promised > 0),
        min(2.0, needed / most),
        max(-2.0, min(2.0, (needed - now) / max(1.0, most - now))),
        _ratio(workers, before.total_workers),
        _ratio(workers, max(seen.latest.cpu_quota, 0.25)) / 3,
        max(grown),
        min(grown),
        float(was is not None),
        _ratio(was.rows_per_s, rate) if was else 0.0,
        min(20.0, seen.state.tick - was.tick) / 10 if was else 0.0,
        _ratio(after.read_ahead_bytes, before.read_ahead_bytes),
        _ratio(after.prefetch_bytes, before.prefetch_bytes),
        min(2.0, processes * size / free),
    ]


def _shapes() -> dict[str, tuple[int, ...]]:
    inputs = len(STAGE_INPUTS) + len(CHANGE_INPUTS) + len(PIPELINE_INPUTS) + len(CANDIDATE_INPUTS)
    judged = 2 * HIDDEN + len(PIPELINE_INPUTS) + len(CANDIDATE_INPUTS)
    shapes: dict[str, tuple[int, ...]] = {}
    for network in range(NETWORKS):
        for name, size in (
            ("stage", (HIDDEN, inputs)),
            ("whole", (HIDDEN, judged)),
            ("value", (2, HIDDEN)),
        ):
            shapes |= {f"{network}.{name}.weight": size, f"{network}.{name}.bias": size[:1]}
    return shapes


SHAPES = _shapes()


def answer(weights: Mapping[str, ndarray], given: LookInputs) -> tuple[ndarray, ndarray]:
    """Returns the gain and the spread of each candidate. The first candidate, `stay`, has 0 of both."""
    count, stages = given.changes.shape[:2]
    whole = np.concatenate(
        [np.broadcast_to(given.pipeline, (count, len(given.pipeline))), given.candidates], axis=1
    )
    each = np.concatenate(
        [
            np.broadcast_to(given.stages, (count, *given.stages.shape)),
            given.changes,
            np.broadcast_to(whole[:, None], (count, stages, whole.shape[1])),
        ],
        axis=2,
    )
    gains, spreads = [], []
    for network in range(NETWORKS):

        def layer(name: str, values: ndarray, network: int = network) -> ndarray:
            part = f"{network}.{name}"
            return np.asarray(values @ weights[f"{part}.weight"].T + weights[f"{part}.bias"])

        state = np.maximum(0, layer("stage", each))
        pooled = np.concatenate([state.mean(axis=1), state.max(axis=1), whole], axis=1)
        value = layer("value", np.maximum(0, layer("whole", pooled)))
        gains.append(value[:, 0] - value[0, 0])
        spreads.append(np.log1p(np.exp(np.minimum(value[:, 1], 30.0))))
    spread = np.hypot(np.mean(spreads, axis=0), np.std(gains, axis=0))
    spread[0] = 0.0
    return np.mean(gains, axis=0), spread


def pick(gains: ndarray, spreads: ndarray, caution: float | ndarray) -> int:
    """Returns the candidate with the best lower estimate of its gain over staying, less the price of a change."""
    lower = gains - caution * spreads
    lower[1:] -= _CHANGE_PRICE
    return int(np.argmax(lower))


class ValueNetwork:
    """The value of each candidate at a look. `caution` is how many spreads a gain has to exceed."""

    def __init__(self, weights: Mapping[str, ndarray], record: Mapping[str, Any]) -> None:
        self.weights, self.record = weights, record
        self.caution = float(record["caution"])
        self.digest = digest(*weights.values())

    @classmethod
    def load(cls, path: Path) -> ValueNetwork:
        return cls(*read(path, SHAPES))

    @classmethod
    def in_use(cls) -> ValueNetwork | None:
        """Returns the network of the package. None if there are no weights."""
        return cls.load(SHIPPED) if SHIPPED.exists() else None

    def values(self, seen: Observation, candidates: Sequence[Candidate]) -> list[Value]:
        gains, spreads = answer(self.weights, features(seen, candidates))
        return [Value(float(g), float(s)) for g, s in zip(gains, spreads, strict=True)]
