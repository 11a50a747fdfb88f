"""The learned policy for the initial setting: `NetworkPolicy`.

    Glimpse ──observe──▶ Inputs ──answer──▶ Answers ──setting──▶ Setting ──▶ InitialSetting

The code follows this order. Arrays are pipeline × stage, or have one value for each pipeline. A run has one pipeline;
the teacher (`sluice.agent.lab.opening_teacher`) passes hundreds at once.

All stages share one network. Each stage receives the mean and the maximum of all stages, and the state of its
neighbours. First a formula estimates each stage's workers. The network multiplies this plain estimate by a factor, so a
pipeline that is a thousand times faster looks similar. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from sluice.agent.policies.opening.contract import InitialSetting, PolicyInput
from sluice.agent.policies.opening.weights import SHIPPED, digest, read
from sluice.ingest.knobs import Knobs

HIDDEN = 48
_MIB = 2**20
_AHEAD_ITEMS, _AHEAD_BATCHES = 4, 8  # what buffers hold by the plain estimate
SURE = 1.0  # a stage moves to its other back end from this logit on
FARTHEST = 4.0  # the largest correction, as a logarithm
_LONG_S = 2.0  # a longer look counts as this
_MARGIN = 0.05  # of an input's training range: an input may be outside by this much
_COUNTERS = {
    "busy_s": "busy_s",
    "cpu_s": "cpu_s",
    "core_wait_s": "core_wait_s",
    "in_s": "wait_input_s",
    "out_s": "wait_output_s",
}
"""Field of `Glimpse` → counter of a stage. Each field is the increase of its counter."""

STAGE_INPUTS = (
    "share of its workers busy",
    "share starved",
    "share blocked",
    "processor time in its work",
    "waits for a core",
    "workers",
    "workers by the plain estimate",
    "share of all work",
    "capacity",
    "runs in processes",
    "can be moved",
    "most workers",
    "place",
    "is the first",
    "is the last",
    "memory of its items",
    "memory of its processes",
    "has worked",
    "is known to be Python",
    "is known to be vectorised",
    "fill of the queue behind it",
)
PIPELINE_INPUTS = (
    "stall",
    "share of cores in use",
    "cores",
    "memory in use",
    "what the trainer would take",
    "pace",
    "the trainer computes",
    "stages",
    "cores used by others",
    "seconds of the look",
    "store is known to be remote",
    "store is known to be local",
    "bytes of a row",
    "bytes of a row are known",
    "rows of a row group",
    "row groups are known",
    "memory of a process is known",
)
_LOGARITHMS = {
    "workers",
    "workers by the plain estimate",
    "share of all work",
    "capacity",
    "most workers",
    "cores",
    "memory of its items",
    "memory of its processes",
    "what the trainer would take",
    "pace",
    "bytes of a row",
    "rows of a row group",
}
_PARTS = {"place": 8, "stages": 9}  # these inputs are divided by these numbers
_UNCHECKED = set(_PARTS)  # the stages share their weights, so the network takes any number of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Glimpse:
    """What pipelines did between two snapshots, and what else is known of them. NaN: unknown."""

    seconds: float
    real: ndarray
    """Where there is a stage. A pipeline's last stage is in the last column."""
    rows: ndarray
    busy_s: ndarray
    cpu_s: ndarray
    core_wait_s: ndarray
    in_s: ndarray
    out_s: ndarray
    item_bytes: ndarray
    row_bytes: ndarray
    fill: ndarray
    workers: ndarray
    most: ndarray
    process: ndarray
    movable: ndarray
    read_ahead_bytes: ndarray
    prefetch_bytes: ndarray
    python: ndarray
    consumed: ndarray
    wait_s: ndarray
    compute_s: ndarray
    used_s: ndarray
    cores: ndarray
    memory_used: ndarray
    memory_limit: ndarray
    batch_rows: ndarray
    remote: ndarray
    known_row_bytes: ndarray
    group_rows: ndarray
    process_bytes: ndarray

    @classmethod
    def of(cls, given: PolicyInput) -> Glimpse:
        """Returns the look of a run. A fused stage's work counts as work of the stage whose workers do it."""
        own = given.own_stages
        return cls(
            seconds=given.seen.at - given.begun.at,
            real=np.ones((1, len(own)), bool),
            process=np.array([[given.knobs.backend.get(name) == "process" for name in own]]),
            movable=np.array([[given.is_movable(name) for name in own]]),
            **{name: np.array([row], float) for name, row in _stage_numbers(given, own).items()},
            **{
                name: np.array([np.nan if value is None else value], float)
                for name, value in _pipeline_numbers(given).items()
            },
        )


def _stage_numbers(given: PolicyInput, own: Sequence[str]) -> dict[str, list[float]]:
    """Returns the fields of a `Glimpse` that have a number for each of the stages `own`."""
    seen, begun = given.seen, given.begun
    knobs, limits = given.knobs, given.limits
    heads = [limits.head(knobs, stage.name) for stage in seen.stages]
    spent = {
        name: [
            sum(
                getattr(now, counter) - getattr(then, counter)
                for now, then, head in zip(seen.stages, begun.stages, heads, strict=True)
                if head == stage
            )
            for stage in own
        ]
        for name, counter in _COUNTERS.items()
    }
    ends = dict(zip(heads, seen.stages, strict=True))  # the last stage of each group of fused ones
    last = [ends[name] for name in own]
    kinds = [(given.known.operators or {}).get(name) for name in own]
    return {
        **spent,
        "rows": [s.rows - begun.stage(s.name).rows for s in last],
        "item_bytes": [s.bytes / max(1, s.items) for s in last],
        "row_bytes": [s.bytes / max(1, s.rows) for s in last],
        "fill": [s.queue_bytes / s.queue_limit_bytes if s.queue_limit_bytes else 0.0 for s in last],
        "workers": [knobs.workers[name] for name in own],
        "most": [limits.workers[name][1] for name in own],
        "python": [np.nan if kind is None else float(kind == "python") for kind in kinds],
    }


def _pipeline_numbers(given: PolicyInput) -> dict[str, float | None]:
    """Returns the fields of a `Glimpse` that have one number. None: unknown."""
    seen, begun = given.seen, given.begun
    knobs, known = given.knobs, given.known
    last = seen.stages[-1]
    return {
        "consumed": seen.rows - begun.rows,
        "wait_s": seen.consumer_wait_s - begun.consumer_wait_s,
        "compute_s": seen.consumer_compute_s - begun.consumer_compute_s,
        "used_s": seen.cpu_used_s - begun.cpu_used_s,
        "read_ahead_bytes": knobs.read_ahead_bytes,
        "prefetch_bytes": knobs.prefetch_bytes,
        "cores": seen.cpu_quota,
        "memory_used": seen.memory_used,
        "memory_limit": seen.memory_limit,
        "batch_rows": seen.rows / seen.batches if seen.batches else last.rows / max(1, last.items),
        "remote": None if known.store is None else known.store == "remote",
        "known_row_bytes": known.row_bytes,
        "group_rows": known.row_group_rows,
        "process_bytes": given.process_bytes,
    }


class Inputs(NamedTuple):
    """The network's inputs for each stage (STAGE_INPUTS) and pipeline, and the plain estimate that it corrects."""

    stages: ndarray
    pipelines: ndarray
    workers: ndarray
    """The logarithm of the workers that each stage needs if costs stay the same and the cores are the limit."""
    bound: ndarray
    """Rows a second that the cores and the trainer allow."""


def observe(look: Glimpse) -> Inputs:
    rows = look.rows
    worked = look.real & (rows > 0)
    per_row = 1 / np.maximum(rows, 1.0)
    cpu = np.where(worked, look.cpu_s * per_row, 0.0)
    use = np.where(
        worked,
        np.maximum(np.maximum(look.busy_s - look.core_wait_s, look.cpu_s), 1e-9) * per_row,
        0.0,
    )
    computes = look.compute_s > 1e-6 * look.seconds
    demand = np.where(
        computes, np.maximum(look.consumed, 1.0) / np.maximum(look.compute_s, 1e-9), 1e12
    )
    bound = np.minimum(demand, look.cores / np.maximum(cpu.sum(axis=1), 1e-12))
    wanted = np.clip(bound[:, None] * use, 1.0, look.most)
    estimate = np.where(worked, np.log(wanted), np.log(np.maximum(look.workers, 1.0)))
    stages = _stack(_stage_inputs(look, worked, cpu, use, bound, estimate))
    pipelines = _stack(_pipeline_inputs(look, computes, demand, bound))
    return Inputs(np.where(look.real[..., None], stages, 0), pipelines, estimate, bound)


def _stage_inputs(  # noqa: PLR0917
    look: Glimpse,
    worked: ndarray,
    cpu: ndarray,
    use: ndarray,
    bound: ndarray,
    estimate: ndarray,
) -> list[ndarray]:
    """Returns STAGE_INPUTS. `cpu` and `use` are processor seconds and worker seconds a row."""
    workers = np.maximum(look.workers, 1.0)
    capacity = np.where(worked, workers / np.maximum(use, 1e-12) / bound[:, None], 1.0)
    order = np.cumsum(look.real, axis=1)
    memory = look.memory_limit[:, None]
    process_bytes = np.nan_to_num(look.process_bytes)[:, None] * look.movable * np.exp(estimate)
    return [
        *(
            np.minimum(1.0, share / look.seconds / workers)
            for share in (look.busy_s, look.in_s, look.out_s)
        ),
        np.minimum(1.0, cpu / np.maximum(use, 1e-12)),
        np.minimum(1.0, look.core_wait_s / np.maximum(look.busy_s, 1e-6)),
        _scaled_log(workers),
        estimate / 3,
        _scaled_log(use / np.maximum(use.sum(axis=1), 1e-12)[:, None]),
        _scaled_log(capacity),
        look.process,
        look.movable,
        _scaled_log(look.most),
        order / 8,
        order == 1,
        order == order[:, -1:],
        _scaled_log(look.item_bytes * np.exp(estimate) / memory, 1e-6),
        _scaled_log(process_bytes / memory, 1e-6),
        worked,
        look.python == 1,
        look.python == 0,
        np.minimum(1.0, look.fill),
    ]


def _pipeline_inputs(
    look: Glimpse, computes: ndarray, demand: ndarray, bound: ndarray
) -> list[ndarray]:
    """Returns PIPELINE_INPUTS."""
    real, seconds = look.real, look.seconds
    return [
        look.wait_s / np.maximum(look.wait_s + look.compute_s, 1e-9),
        look.used_s / seconds / look.cores,
        _scaled_log(look.cores),
        look.memory_used / look.memory_limit,
        _scaled_log(demand / bound, high=1e3),
        _scaled_log(bound / np.maximum(look.consumed / seconds, 1e-9)),
        computes,
        real.sum(axis=1) / 9,
        np.maximum(0.0, look.used_s - (look.cpu_s * real).sum(axis=1)) / seconds / look.cores,
        np.full(len(real), min(seconds, _LONG_S)),
        look.remote == 1,
        look.remote == 0,
        np.nan_to_num(_scaled_log(look.known_row_bytes)),
        ~np.isnan(look.known_row_bytes),
        np.nan_to_num(_scaled_log(look.group_rows, high=1e7)),
        ~np.isnan(look.group_rows),
        ~np.isnan(look.process_bytes),
    ]


def _scaled_log(value: ndarray, low: float = 1e-4, high: float = 1e4) -> ndarray:
    return np.asarray(np.log(np.clip(value, low, high)) / 3)


def _stack(inputs: Sequence[ndarray]) -> ndarray:
    return np.stack([np.asarray(one, np.float32) for one in inputs], axis=-1)


class Answers(NamedTuple):
    """The network's output. `workers` is added to the logarithm of the plain estimate."""

    workers: ndarray
    process: ndarray
    """The logit of the probability that the stage should run in processes."""
    pipelines: ndarray
    """Pipeline × 3. The first two are added to the logarithms of both buffers' plain sizes. The third is added to the
    logarithm of the bound, which gives the promised rate."""


def answer(weights: Mapping[str, ndarray], inputs: Inputs, real: ndarray) -> Answers:
    def layer(name: str, values: ndarray) -> ndarray:
        return np.asarray(values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])

    def mean_and_maximum(state: ndarray) -> tuple[ndarray, ndarray]:
        mean = (state * mask).sum(axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True)
        return mean, (state * mask).max(
            axis=1, keepdims=True
        )  # no state is below 0, so a masked one never wins

    mask = real[..., None].astype(np.float32)
    wide = np.broadcast_to(inputs.pipelines[:, None], (*real.shape, inputs.pipelines.shape[-1]))
    state = np.maximum(0, layer("see", np.concatenate([inputs.stages, wide], axis=-1)))
    for name in ("hear", "hear_again"):
        state *= mask
        mean, top = mean_and_maximum(state)
        nothing = np.zeros_like(state[:, :1])
        before, after = (
            np.concatenate([nothing, state[:, :-1]], 1),
            np.concatenate([state[:, 1:], nothing], 1),
        )
        state = np.maximum(
            0,
            layer(
                name,
                np.concatenate(
                    [
                        state,
                        np.broadcast_to(mean, state.shape),
                        np.broadcast_to(top, state.shape),
                        before,
                        after,
                    ],
                    axis=-1,
                ),
            ),
        )
    of_stage = layer("stage", state)
    of_pipeline = layer("pipeline", np.concatenate(mean_and_maximum(state), axis=-1)[:, 0])
    return Answers(of_stage[..., 0], of_stage[..., 1], of_pipeline)


class Setting(NamedTuple):
    """The knobs of pipelines before their limits are applied, and the promised rate."""

    workers: ndarray
    process: ndarray
    read_ahead_bytes: ndarray
    prefetch_bytes: ndarray
    rows_per_s: ndarray


def buffers(look: Glimpse, workers: ndarray) -> tuple[ndarray, ndarray]:
    """Returns the plain sizes of the read-ahead and prefetch buffers for these workers.

    They are at least the present sizes, and large enough to smooth variation. Each takes at most an eighth of the
    memory."""
    pipelines = np.arange(len(look.real))
    first = look.real.argmax(axis=1)
    most = look.memory_limit / 8
    ahead = (_AHEAD_ITEMS + workers[pipelines, first]) * look.item_bytes[pipelines, first]
    fetch = _AHEAD_BATCHES * np.maximum(
        look.batch_rows * look.row_bytes[:, -1], look.item_bytes[:, -1]
    )
    return (
        np.clip(np.maximum(ahead, look.read_ahead_bytes), _MIB, most),
        np.clip(np.maximum(fetch, look.prefetch_bytes), _MIB, most),
    )


def setting(look: Glimpse, inputs: Inputs, answers: Answers) -> Setting:
    near = [
        np.clip(value, -FARTHEST, FARTHEST) for value in (answers.workers, *answers.pipelines.T)
    ]
    workers = np.clip(np.rint(np.exp(inputs.workers + near[0])), 1, look.most)
    ahead, fetch = buffers(look, workers)
    # A move needs memory and time for processes, so the network has to be sure of it.
    moving = answers.process > np.where(look.process, -SURE, SURE)
    more = [np.exp(np.maximum(0.0, each)) for each in near[1:3]]  # buffers never get smaller
    return Setting(
        workers,
        np.where(look.movable, moving, look.process),
        ahead * more[0],
        fetch * more[1],
        inputs.bound * np.exp(near[3]),
    )


def knobs_of(given: PolicyInput, chosen: Setting, row: int) -> Knobs:
    """Returns the knobs of pipeline `row`, within its limits."""
    own = given.own_stages
    last = slice(-len(own), None)
    counts = [max(1, round(count)) for count in chosen.workers[row][last]]
    workers = dict(zip(own, counts, strict=True))
    kinds = {
        name: "process" if moved else "thread"
        for name, moved in zip(own, chosen.process[row][last], strict=True)
        if given.is_movable(name)
    }
    return given.limits.clamp(
        Knobs(
            workers={**given.knobs.workers, **workers},
            backend={**given.knobs.backend, **kinds},
            fused=given.knobs.fused,
            read_ahead_bytes=_MIB * -int(-chosen.read_ahead_bytes[row] // _MIB),
            prefetch_bytes=_MIB * -int(-chosen.prefetch_bytes[row] // _MIB),
        )
    )


class NetworkPolicy:
    """Chooses the initial setting with the learned weights."""

    def __init__(self, weights: Mapping[str, ndarray], record: Mapping[str, Any]) -> None:
        """`record` describes the training: seed, date, command, lives, table. Its `ranges` are the training ranges of
        the inputs."""
        self._weights, self.record = weights, record
        self._ranges = [
            np.asarray(record["ranges"][part], float) for part in ("stages", "pipelines")
        ]

    @classmethod
    def load(cls, path: Path) -> NetworkPolicy:
        """Raises WeightsError for a file that does not hold such a network."""
        return cls(*read(path, SHAPES))

    @classmethod
    def in_use(cls) -> NetworkPolicy | None:
        """Returns the policy of the package. None if there are no weights."""
        return cls.load(SHIPPED) if SHIPPED.exists() else None

    @property
    def digest(self) -> str:
        return digest(*(self._weights[name] for name in sorted(self._weights)))

    def choose(self, given: PolicyInput) -> InitialSetting:
        look = Glimpse.of(given)
        inputs = observe(look)
        own = given.own_stages
        if outside := self._outside(inputs, own):
            return InitialSetting(knobs=given.knobs, reason=outside, rows_per_s=None)
        chosen = setting(look, inputs, answer(self._weights, inputs, look.real))
        knobs = knobs_of(given, chosen, 0)
        rate = float(chosen.rows_per_s[0])
        return InitialSetting(
            knobs=knobs,
            rows_per_s=rate,
            reason=(
                f"trained in {self.record['lives']:,} simulated episodes, from {look.seconds:.2g} s of "
                f"{len(own)} stages on {given.seen.cpu_quota:g} cores"
            ),
        )

    def _outside(self, inputs: Inputs, stages: list[str]) -> str:
        """Returns which input is outside the training range, in words; empty if none is."""
        whole, each = inputs.pipelines[0], inputs.stages[0]
        for values, names, ranges, of in [
            (whole, PIPELINE_INPUTS, self._ranges[1], "the pipeline"),
            *(
                (row, STAGE_INPUTS, self._ranges[0], repr(stage))
                for row, stage in zip(each, stages, strict=True)
            ),
        ]:
            margin = _MARGIN * (ranges[:, 1] - ranges[:, 0]) + 1e-6
            outside = (values < ranges[:, 0] - margin) | (values > ranges[:, 1] + margin)
            for i in (i for i in np.flatnonzero(outside) if names[i] not in _UNCHECKED):
                here, low, high = (
                    _plain(names[i], float(value)) for value in (values[i], *ranges[i])
                )
                return f"{names[i]} of {of} is {here:.3g}, and it was trained for {low:.3g} to {high:.3g}"
        return ""


def _plain(name: str, value: float) -> float:
    """Returns an input in ordinary units."""
    return float(np.exp(3 * value)) if name in _LOGARITHMS else value * _PARTS.get(name, 1)


_SEEN = len(STAGE_INPUTS) + len(PIPELINE_INPUTS)
SHAPES = {
    f"{name}.{part}": shape
    for name, ins, outs in (
        ("see", _SEEN, HIDDEN),
        ("hear", 5 * HIDDEN, HIDDEN),
        ("hear_again", 5 * HIDDEN, HIDDEN),
        ("stage", HIDDEN, 2),
        ("pipeline", 2 * HIDDEN, 3),
    )
    for part, shape in (("weight", (outs, ins)), ("bias", (outs,)))
}
