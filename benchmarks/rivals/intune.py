"""`intune`: a reconstruction of InTune (RecSys'23), declared as such: its code and hyper-parameters are not public.

From the publication:

- The agent sees the pipeline's latency, free processors and memory, the model's latency, memory bandwidth and core
  speed.
- The reward is throughput × (1 − memory used / memory limit).
- An action is a small step up or down in each stage and in the prefetched bytes.
- The network has three layers of ReLU. It is trained in simulated pipelines and goes on learning in the live one.

Ours:

- Latency is given per stage: seconds a batch for nine stages, as logarithms in units of the slowest stage's.
- A step is −5, −1, 0, +1 or +5 workers, together within the processors, or a quarter to four times the bytes.
- Deep Q-learning learns the value of each stage's steps from the common reward. In a live pipeline the unit of the
  reward is the best rate seen there.

`python -m benchmarks.rivals.intune_teacher` of commit `a6c6dacc` makes weights and compares the variants. The weights
here are those of the variant that did best on separate pipelines. That variant was trained without the machine's
properties and the prefetched bytes, on pipelines of an earlier generator (their record says so).
"""

from __future__ import annotations

import functools
import math
import timeit
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from sluice.agent.choice.weights import digest, read
from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

STAGES = 9
STEPS = (-5, -1, 0, 1, 5)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of the bytes that are prefetched: the choices of the last place."""
PLACES = STAGES + 1
INPUTS = STAGES + 6
HIDDEN = 128
SIZES = (INPUTS, HIDDEN, HIDDEN, HIDDEN, PLACES * len(STEPS))
DISCOUNT = 0.8
GAIN_SCALE = 5.0
WEIGHTS = Path(__file__).with_name("intune.safetensors")
_LONGEST = 1.0  # gradient that counts in full
_SEEN = 64  # decisions of the live pipeline that each step of learning looks at
_COPIED = 1 << 25  # bytes, by which the memory's bandwidth is measured
_COUNTED, _COUNTED_S = (
    200_000,
    0.01,
)  # additions in Python, and the seconds that a core of speed 1 takes for them
Layers = tuple[tuple[ndarray, ndarray], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the agent sees of the machine in addition to its cores and memory."""

    bytes_per_s: float
    """The bytes that memory can move in a second; 0: no limit."""
    speed: float
    """The speed of a core; 1: as the simulator's."""

    def inputs(self) -> list[float]:
        bandwidth = (
            2.0
            if self.bytes_per_s <= 0
            else min(2.0, max(-4.0, math.log10(self.bytes_per_s / 1e10)))
        )
        return [bandwidth, math.log(self.speed)]


@functools.cache
def hardware() -> Hardware:
    """This machine's, measured once, in some thirty milliseconds: the fastest of three copies, and of three counts."""
    source = np.ones(_COPIED, np.uint8)
    copied_s, counted_s = (
        min(timeit.repeat(work, number=1, repeat=3))
        for work in (source.copy, lambda: sum(range(_COUNTED)))
    )
    return Hardware(bytes_per_s=2 * _COPIED / copied_s, speed=_COUNTED_S / counted_s)


RATE = 1e-2
"""How far a step of gradient descent goes in the live pipeline, as did best on pipelines kept apart (the weights'
record has the table); 0: it does not learn there."""


def reward(rows_per_s: float, used: float, limit: float) -> float:
    """Throughput × (1 − memory used / memory limit); never below 0, even where more is used than the limit."""
    return rows_per_s * max(0.0, 1 - used / limit)


def observe(
    rates: PipelineRates,
    snapshot: Snapshot,
    knobs: Knobs,
    machine: Hardware,
) -> ndarray:
    """The network's inputs. Latencies are in units of the slowest stage's, so the balance shows and not the scale."""
    batch = snapshot.rows / max(1, snapshot.batches)
    latencies = [
        s.busy / s.rows_per_s / s.workers * batch if s.rows_per_s > 0 else 0.0
        for s in rates.stages.values()
    ]
    slowest = max([*latencies, 1e-12])
    values = [math.log(max(value / slowest, 1e-3)) + 7 for value in latencies[:STAGES]]
    model = snapshot.consumer_compute_s / max(1, snapshot.batches)
    values += [0.0] * (STAGES - len(values))
    given = sum(s.workers for s in rates.stages.values())
    prefetched = math.log2(max(knobs.prefetch_bytes, 1) / rates.memory_limit) / 4 + 2
    values += [
        max(-1.0, 1 - given / max(1e-9, rates.cpu_quota)),
        1 - rates.memory_used / rates.memory_limit,
        math.log(max(model / slowest, 1e-3)) + 7,
        *machine.inputs(),
        prefetched,
    ]
    return np.array(values, dtype=np.float32)


def move(knobs: Knobs, limits: Limits, steps: Sequence[int], factor: float, cores: float) -> Knobs:
    """The knobs after one step in each stage, steps down first, and with `factor` times the prefetched bytes. If all
    together would exceed the cores, steps up are cut, beginning with the last stage; no stage falls below its least."""
    workers = dict(knobs.workers)
    for name, step in sorted(
        zip(limits.workers, steps, strict=False), key=lambda pair: pair[1] > 0
    ):
        low, high = limits.workers[name]
        room = max(0, math.floor(cores) - sum(workers.values()))
        workers[name] = min(max(workers[name] + min(step, room), low), high)
    return limits.clamp(
        replace(knobs, workers=workers, prefetch_bytes=max(1, int(factor * knobs.prefetch_bytes)))
    )


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """One decision and what followed: inputs, the choice at each place, the gain of reward, the inputs after it."""

    inputs: ndarray
    chosen: ndarray
    gain: float
    after: ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntuneState:
    limits: Limits
    knobs: Knobs
    layers: Layers
    last: Snapshot | None = None
    inputs: ndarray | None = None
    chosen: ndarray | None = None
    """The inputs of the last decision, and the choices that it made."""
    reward: float = 0.0
    """The last one, in rows a second."""
    best: float = 0.0
    """The best rate seen in this pipeline: the unit of rewards."""
    seen: tuple[Transition, ...] = ()


class InTune(Policy):
    name = "intune"

    def __init__(
        self,
        weights: Path | Layers = WEIGHTS,
        *,
        machine: Hardware | None = None,
        rate: float = RATE,
    ) -> None:
        """`machine` is the one that the pipeline runs on; None: this one."""
        self._layers = load(weights) if isinstance(weights, Path) else weights
        self._machine = machine or hardware()
        self._rate = rate

    def made_of(self) -> dict[str, Any]:
        weights = digest(*(part for layer in self._layers for part in layer))
        return {"weights": weights, "machine": asdict(self._machine)}

    def initial(self, limits: Limits, knobs: Knobs) -> IntuneState:
        return IntuneState(limits=limits, knobs=limits.clamp(knobs), layers=self._layers)

    def decide(self, snapshot: Snapshot, state: IntuneState) -> tuple[Knobs, IntuneState, Reason]:
        measured = rates(state.last, snapshot) if state.last else None
        state = replace(state, last=snapshot)
        if measured is None:
            return state.knobs, state, Reason(text="nothing was seen yet")
        inputs = observe(measured, snapshot, state.knobs, self._machine)
        state = self._learn(
            state,
            inputs,
            reward(measured.rows_per_s, measured.memory_used, measured.memory_limit),
            max(state.best, measured.rows_per_s),
        )
        chosen = values(state.layers, inputs[None])[0].argmax(axis=1)
        steps = [STEPS[i] for i in chosen[: min(STAGES, len(state.limits.workers))]]
        factor = FACTORS[chosen[-1]]
        knobs = move(state.knobs, state.limits, steps, factor, snapshot.cpu_quota)
        return (
            knobs,
            replace(state, knobs=knobs, inputs=inputs, chosen=chosen),
            Reason(
                text=f"the network's steps are {steps}, and {factor:g} times the prefetched bytes"
            ),
        )

    def _learn(self, state: IntuneState, inputs: ndarray, now: float, best: float) -> IntuneState:
        """What followed the last decision, and one step of learning from all that was seen of late."""
        gain = GAIN_SCALE * (now - state.reward) / max(best, 1e-9)
        state = replace(state, reward=now, best=best)
        if not self._rate or state.inputs is None or state.chosen is None:
            return state
        seen = (*state.seen, Transition(state.inputs, state.chosen, gain, inputs))[-_SEEN:]
        present = (np.arange(PLACES) < len(state.limits.workers)) | (np.arange(PLACES) >= STAGES)
        return replace(state, seen=seen, layers=learned(state.layers, seen, present, self._rate))


def values(layers: Layers, inputs: ndarray) -> ndarray:
    """The worth of each choice at each place: inputs × place × choice."""
    return _forward(layers, inputs)[-1].reshape(-1, PLACES, len(STEPS))


def _forward(layers: Layers, inputs: ndarray) -> list[ndarray]:
    """The input of each layer, and last the output."""
    passed = [inputs]
    for weight, bias in layers[:-1]:
        passed.append(np.maximum(passed[-1] @ weight.T + bias, 0))
    weight, bias = layers[-1]
    return [*passed, passed[-1] @ weight.T + bias]


def learned(layers: Layers, seen: Sequence[Transition], present: ndarray, rate: float) -> Layers:
    """The layers after one step of gradient descent on the squared errors of Q-learning, averaged over the places that
    are present. A steeper gradient goes no further than one of length 1, or a surprise would undo what was taught."""
    share = present / present.sum()
    after = values(layers, np.stack([one.after for one in seen])).max(axis=2) @ share
    goals = np.array([one.gain for one in seen]) + DISCOUNT * after
    passed = _forward(layers, np.stack([one.inputs for one in seen]))
    found, chosen = (
        passed[-1].reshape(-1, PLACES, len(STEPS)),
        np.stack([one.chosen for one in seen])[:, :, None],
    )
    errors = np.zeros_like(found)
    off = np.take_along_axis(found, chosen, 2)[:, :, 0] - goals[:, None]
    np.put_along_axis(
        errors, chosen, (2 * share * off / len(seen))[:, :, None].astype(found.dtype), 2
    )
    back, steps = errors.reshape(len(seen), -1), []
    for (weight, _), given in zip(reversed(layers), reversed(passed[:-1]), strict=True):
        steps.append((back.T @ given, back.sum(axis=0)))
        back = (back @ weight) * (given > 0)
    length = math.sqrt(sum(float((part**2).sum()) for step in steps for part in step))
    rate *= min(1.0, _LONGEST / max(length, 1e-12))
    return tuple(
        (weight - rate * by, bias - rate * up)
        for (weight, bias), (by, up) in zip(layers, reversed(steps), strict=True)
    )


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of a weights file."""
    return {
        name: shape
        for i in range(len(SIZES) - 1)
        for name, shape in ((f"weight{i}", (SIZES[i + 1], SIZES[i])), (f"bias{i}", (SIZES[i + 1],)))
    }


def load(path: Path) -> Layers:
    """The weight and bias of each layer. Raises WeightsError for a file that is not such a network."""
    tensors, _ = read(path, shapes(), "git checkout benchmarks/rivals/intune.safetensors")
    return tuple((tensors[f"weight{i}"], tensors[f"bias{i}"]) for i in range(len(SIZES) - 1))
