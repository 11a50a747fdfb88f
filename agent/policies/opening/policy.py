"""The learned opening, from what was seen to what is set: `NetworkPolicy`.

    Glimpse ──observe──▶ Inputs ──answer──▶ Answers ──setting──▶ Setting ──▶ InitialSetting

Read it from above to below. Arrays are pipeline × stage or of pipelines: a run has one pipeline, and the teacher
(`sluice.agent.learn.opening_teacher`) hands over thousands at once, so that both go the same way. The network is shared
by all stages, who hear each other's mean, maximum and neighbours; it corrects a plain estimate by logarithms, so that a
pipeline a thousand times faster looks alike. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sluice.agent.policies.opening.contract import InitialSetting, PolicyInput
from sluice.agent.policies.opening.weights import in_use, read
from sluice.ingest.knobs import Knobs

HIDDEN = 48
_MIB = 2**20
_AHEAD_ITEMS, _AHEAD_BATCHES = 4, 8  # what buffers hold by the plain estimate
SURE = 1.0  # the logit from which on a stage moves to its other back end
FARTHEST = 4.0  # the largest correction, as a logarithm
_LONG_S = 2.0  # a look may be longer and counts as this
_MARGIN = (
    0.05  # of the range of an input while the network was taught, by which one may lie outside
)

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
_PARTS = {"place": 8, "stages": 9}  # inputs that are numbers divided by these
_UNCHECKED = set(_PARTS)  # the stages share their weights, so the network takes any number of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Glimpse:
    """What pipelines did between two snapshots, and what is known of them besides. NaN: nobody said."""

    seconds: float
    real: np.ndarray
    """Where there is a stage; a pipeline's last stage is in the last column."""
    rows: np.ndarray
    busy_s: np.ndarray
    cpu_s: np.ndarray
    core_wait_s: np.ndarray
    in_s: np.ndarray
    out_s: np.ndarray
    item_bytes: np.ndarray
    row_bytes: np.ndarray
    fill: np.ndarray
    workers: np.ndarray
    most: np.ndarray
    process: np.ndarray
    movable: np.ndarray
    read_ahead_bytes: np.ndarray
    prefetch_bytes: np.ndarray
    python: np.ndarray
    consumed: np.ndarray
    wait_s: np.ndarray
    compute_s: np.ndarray
    used_s: np.ndarray
    cores: np.ndarray
    memory_used: np.ndarray
    memory_limit: np.ndarray
    batch_rows: np.ndarray
    remote: np.ndarray
    known_row_bytes: np.ndarray
    group_rows: np.ndarray
    process_bytes: np.ndarray

    @classmethod
    def of(cls, given: PolicyInput) -> Glimpse:
        """The look of a run. A fused stage's work counts as that of the stage whose workers do it."""
        seen = given.seen
        knobs = given.knobs
        limits = given.limits
        known = given.known
        names = [stage.name for stage in seen.stages]
        heads = [limits.head(knobs, name) for name in names]
        own = [name for name in names if name not in knobs.fused]
        ends = {head: i for i, head in enumerate(heads)}  # where the work of a stage's workers ends

        def sums(field: str) -> np.ndarray:
            spent = [
                getattr(now, field) - getattr(then, field)
                for now, then in zip(seen.stages, given.begun.stages, strict=True)
            ]
            return np.array(
                [
                    [
                        sum(s for s, head in zip(spent, heads, strict=True) if head == name)
                        for name in own
                    ]
                ]
            )

        def of_each(*values: float) -> np.ndarray:
            return np.array([values], float)

        def of_pipeline(value: float | None) -> np.ndarray:
            return np.array([np.nan if value is None else value], float)

        def passed(field: str) -> np.ndarray:
            return of_pipeline(getattr(seen, field) - getattr(given.begun, field))

        last = [seen.stages[ends[name]] for name in own]
        python = [(known.operators or {}).get(name) for name in own]
        batch = seen.rows / seen.batches if seen.batches else last[-1].rows / max(1, last[-1].items)
        return cls(
            seconds=seen.at - given.begun.at,
            real=np.ones((1, len(own)), bool),
            busy_s=sums("busy_s"),
            cpu_s=sums("cpu_s"),
            core_wait_s=sums("core_wait_s"),
            in_s=sums("wait_input_s"),
            out_s=sums("wait_output_s"),
            rows=of_each(*(s.rows - given.begun.stage(s.name).rows for s in last)),
            item_bytes=of_each(*(s.bytes / max(1, s.items) for s in last)),
            row_bytes=of_each(*(s.bytes / max(1, s.rows) for s in last)),
            fill=of_each(
                *(s.queue_bytes / s.queue_limit_bytes if s.queue_limit_bytes else 0.0 for s in last)
            ),
            workers=of_each(*(knobs.workers[name] for name in own)),
            most=of_each(*(limits.workers[name][1] for name in own)),
            process=np.array([[knobs.backend.get(name) == "process" for name in own]]),
            movable=np.array([[limits.movable(name, knobs.backend.get(name)) for name in own]]),
            python=of_each(
                *(np.nan if kind is None else float(kind == "python") for kind in python)
            ),
            consumed=passed("rows"),
            wait_s=passed("consumer_wait_s"),
            compute_s=passed("consumer_compute_s"),
            read_ahead_bytes=of_pipeline(knobs.read_ahead_bytes),
            prefetch_bytes=of_pipeline(knobs.prefetch_bytes),
            used_s=passed("cpu_used_s"),
            cores=of_pipeline(seen.cpu_quota),
            memory_used=of_pipeline(seen.memory_used),
            memory_limit=of_pipeline(seen.memory_limit),
            batch_rows=of_pipeline(batch),
            remote=of_pipeline(None if known.store is None else float(known.store == "remote")),
            known_row_bytes=of_pipeline(known.row_bytes),
            group_rows=of_pipeline(known.row_group_rows),
            process_bytes=of_pipeline(given.process_bytes),
        )


class Inputs(NamedTuple):
    """What the network sees of each stage (STAGE_INPUTS) and pipeline, and the plain estimate that it corrects."""

    stages: np.ndarray
    pipelines: np.ndarray
    workers: np.ndarray
    """The logarithm of each stage's workers, if its work stayed as dear as it is and the cores were the limit."""
    bound: np.ndarray
    """Rows a second that the cores and the trainer allow."""


def observe(look: Glimpse) -> Inputs:
    def log(value: np.ndarray, low: float = 1e-4, high: float = 1e4) -> np.ndarray:
        return np.asarray(np.log(np.clip(value, low, high)) / 3)

    def known(value: np.ndarray, as_input: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(value), 0.0, as_input)

    real = look.real
    seconds = look.seconds
    rows = look.rows
    worked = real & (rows > 0)
    per_row = 1 / np.maximum(rows, 1.0)
    cpu = np.where(worked, look.cpu_s * per_row, 0.0)
    use = np.where(
        worked,
        np.maximum(np.maximum(look.busy_s - look.core_wait_s, look.cpu_s), 1e-9) * per_row,
        0.0,
    )
    computes = look.compute_s > 1e-6 * seconds
    demand = np.where(
        computes, np.maximum(look.consumed, 1.0) / np.maximum(look.compute_s, 1e-9), 1e12
    )
    bound = np.minimum(demand, look.cores / np.maximum(cpu.sum(axis=1), 1e-12))
    workers = np.maximum(look.workers, 1.0)
    wanted = np.clip(bound[:, None] * use, 1.0, look.most)
    estimate = np.where(worked, np.log(wanted), np.log(workers))
    capacity = np.where(worked, workers / np.maximum(use, 1e-12) / bound[:, None], 1.0)
    order = np.cumsum(real, axis=1)
    memory = look.memory_limit[:, None]
    shares = [
        np.minimum(1.0, share / seconds / workers) for share in (look.busy_s, look.in_s, look.out_s)
    ]
    process_bytes = np.nan_to_num(look.process_bytes)[:, None] * look.movable * np.exp(estimate)
    stages = [
        *shares,
        np.minimum(1.0, cpu / np.maximum(use, 1e-12)),
        np.minimum(1.0, look.core_wait_s / np.maximum(look.busy_s, 1e-6)),
        log(workers),
        estimate / 3,
        log(use / np.maximum(use.sum(axis=1), 1e-12)[:, None]),
        log(capacity),
        look.process,
        look.movable,
        log(look.most),
        order / 8,
        order == 1,
        order == order[:, -1:],
        log(look.item_bytes * np.exp(estimate) / memory, 1e-6),
        log(process_bytes / memory, 1e-6),
        worked,
        look.python == 1,
        look.python == 0,
        np.minimum(1.0, look.fill),
    ]
    pipelines = [
        look.wait_s / np.maximum(look.wait_s + look.compute_s, 1e-9),
        look.used_s / seconds / look.cores,
        log(look.cores),
        look.memory_used / look.memory_limit,
        log(demand / bound, high=1e3),
        log(bound / np.maximum(look.consumed / seconds, 1e-9)),
        computes,
        real.sum(axis=1) / 9,
        np.maximum(0.0, look.used_s - (look.cpu_s * real).sum(axis=1)) / seconds / look.cores,
        np.full(len(real), min(seconds, _LONG_S)),
        look.remote == 1,
        look.remote == 0,
        known(look.known_row_bytes, log(look.known_row_bytes)),
        ~np.isnan(look.known_row_bytes),
        known(look.group_rows, log(look.group_rows, high=1e7)),
        ~np.isnan(look.group_rows),
        ~np.isnan(look.process_bytes),
    ]
    return Inputs(
        np.where(
            real[..., None], np.stack([np.asarray(s, np.float32) for s in stages], axis=-1), 0
        ),
        np.stack([np.asarray(p, np.float32) for p in pipelines], axis=-1),
        estimate,
        bound,
    )


class Answers(NamedTuple):
    """What the network says: of each stage's workers, what is added to the logarithm of the plain estimate."""

    workers: np.ndarray
    process: np.ndarray
    """How likely it should run in processes, as a logit."""
    pipelines: np.ndarray
    """Pipeline × 3: what is added to the logarithms of both buffers' plain sizes, and of the bound, which is then the
    promised rate."""


def answer(weights: Mapping[str, np.ndarray], inputs: Inputs, real: np.ndarray) -> Answers:
    def layer(name: str, values: np.ndarray) -> np.ndarray:
        return np.asarray(values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])

    def heard(state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean = (state * mask).sum(axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True)
        return mean, (state * mask).max(axis=1, keepdims=True)  # states are never below 0

    mask = real[..., None].astype(np.float32)
    wide = np.broadcast_to(inputs.pipelines[:, None], (*real.shape, inputs.pipelines.shape[-1]))
    state = np.maximum(0, layer("see", np.concatenate([inputs.stages, wide], axis=-1)))
    for name in ("hear", "hear_again"):
        state *= mask
        mean, top = heard(state)
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
    of_pipeline = layer("pipeline", np.concatenate(heard(state), axis=-1)[:, 0])
    return Answers(of_stage[..., 0], of_stage[..., 1], of_pipeline)


class Setting(NamedTuple):
    """The knobs of pipelines, before each one's limits, and the rate that is promised."""

    workers: np.ndarray
    process: np.ndarray
    read_ahead_bytes: np.ndarray
    prefetch_bytes: np.ndarray
    rows_per_s: np.ndarray


def buffers(look: Glimpse, workers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The plain sizes of both buffers for so many workers: those in force, or more if that takes more to smooth
    variation; an eighth of the memory at most."""
    pipelines = np.arange(len(look.real))
    first = look.real.argmax(axis=1)
    room = look.memory_limit / 8
    ahead = (_AHEAD_ITEMS + workers[pipelines, first]) * look.item_bytes[pipelines, first]
    fetch = _AHEAD_BATCHES * np.maximum(
        look.batch_rows * look.row_bytes[:, -1], look.item_bytes[:, -1]
    )
    return (
        np.clip(np.maximum(ahead, look.read_ahead_bytes), _MIB, room),
        np.clip(np.maximum(fetch, look.prefetch_bytes), _MIB, room),
    )


def setting(look: Glimpse, inputs: Inputs, answers: Answers) -> Setting:
    near = [
        np.clip(value, -FARTHEST, FARTHEST) for value in (answers.workers, *answers.pipelines.T)
    ]
    workers = np.clip(np.rint(np.exp(inputs.workers + near[0])), 1, look.most)
    ahead, fetch = buffers(look, workers)
    moving = answers.process > np.where(
        look.process, -SURE, SURE
    )  # a move is dear: others wait for the first process
    more = [np.exp(np.maximum(0.0, each)) for each in near[1:3]]  # buffers are not what to save on
    return Setting(
        workers,
        np.where(look.movable, moving, look.process),
        ahead * more[0],
        fetch * more[1],
        inputs.bound * np.exp(near[3]),
    )


class NetworkPolicy:
    """Opens as it was taught."""

    def __init__(self, weights: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> None:
        """`record` says how it was taught: seed, date, command, lives, table; and `ranges`, within which each input
        lay."""
        self._weights, self.record = weights, record
        self._ranges = [
            np.asarray(record["ranges"][part], float) for part in ("stages", "pipelines")
        ]

    @classmethod
    def load(cls, path: Path) -> NetworkPolicy:
        """Raises WeightsError for a file that is no such network."""
        return cls(*read(path, SHAPES))

    @classmethod
    def in_use(cls) -> NetworkPolicy | None:
        """The one that runs open with; None if there are no weights for one."""
        path = in_use()
        return None if path is None else cls.load(path)

    def choose(self, given: PolicyInput) -> InitialSetting:
        look = Glimpse.of(given)
        inputs = observe(look)
        outside = self._outside(
            inputs, [name for name in given.limits.workers if name not in given.knobs.fused]
        )
        if outside:
            return InitialSetting(knobs=given.knobs, inside=False, reason=outside, rows_per_s=None)
        chosen = setting(look, inputs, answer(self._weights, inputs, look.real))
        own = [stage.name for stage in given.seen.stages if stage.name not in given.knobs.fused]
        movable = [
            name for name in own if given.limits.movable(name, given.knobs.backend.get(name))
        ]
        knobs = given.limits.clamp(
            Knobs(
                workers={
                    **given.knobs.workers,
                    **{n: int(w) for n, w in zip(own, chosen.workers[0], strict=True)},
                },
                backend={
                    **given.knobs.backend,
                    **{
                        n: "process" if moved else "thread"
                        for n, moved in zip(own, chosen.process[0], strict=True)
                        if n in movable
                    },
                },
                fused=given.knobs.fused,
                read_ahead_bytes=_MIB * -int(-chosen.read_ahead_bytes[0] // _MIB),
                prefetch_bytes=_MIB * -int(-chosen.prefetch_bytes[0] // _MIB),
            )
        )
        rate = float(chosen.rows_per_s[0])
        return InitialSetting(
            knobs=knobs,
            inside=True,
            rows_per_s=rate,
            reason=(
                f"taught in {self.record['lives']:,} simulated episodes, for what {len(own)} stages did in "
                f"{look.seconds:.2g} s on {given.seen.cpu_quota:g} cores"
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
            room = _MARGIN * (ranges[:, 1] - ranges[:, 0]) + 1e-6
            outside = (values < ranges[:, 0] - room) | (values > ranges[:, 1] + room)
            for i in (i for i in np.flatnonzero(outside) if names[i] not in _UNCHECKED):
                here, low, high = (
                    _plain(names[i], float(value)) for value in (values[i], *ranges[i])
                )
                return f"{names[i]} of {of} is {here:.3g}, and it was trained for {low:.3g} to {high:.3g}"
        return ""


def _plain(name: str, value: float) -> float:
    """An input as people count it."""
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
