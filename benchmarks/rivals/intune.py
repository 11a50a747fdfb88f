"""`intune`: our reimplementation of InTune (RecSys 2023, arXiv 2308.08500). Its code and settings are not public.

From the publication:

- The state has the latency of each stage and of the model, the free cores and memory, and the machine's properties.
- The reward is the throughput times the free share of the memory.
- An action is a small step up or down in each stage and in the prefetched bytes.
- Three layers of ReLU are trained in simulated pipelines, and go on learning in the live one.

Ours:

- There are places for nine stages. A latency is the logarithm of seconds a batch, in units of the slowest stage's.
- The steps of all stages together stay within the cores.
- Deep Q-learning learns the value of each place's steps from the common reward, in units of the best rate so far.

The weights are those that did best on separate pipelines. They were trained without the machine's properties and the
prefetched bytes, on an earlier generator's pipelines, by the teacher of commit `a6c6dacc`. Today's is
`intune_teacher.py` beside it.
"""

from __future__ import annotations

import functools
import itertools
import math
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.report.format import moves
from sluice.agent.tunable import Policy, Reason
from sluice.benchmarks.rivals.weights import digest, read
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

STAGES = 9
STEPS = (-5, -1, 0, 1, 5)
"""The choices for a stage: workers more or less."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The choices of the last place: times the prefetched bytes."""
PLACES = STAGES + 1
SIZES = (STAGES + 6, 128, 128, 128, PLACES * len(STEPS))
SHAPES = {
    name: shape
    for i, (less, more) in enumerate(itertools.pairwise(SIZES))
    for name, shape in ((f"weight{i}", (more, less)), (f"bias{i}", (more,)))
}
WEIGHTS = Path(__file__).with_name("intune.safetensors")
RATE = 1e-2
"""How far a step of gradient descent goes."""
_DISCOUNT = 0.8
_GAIN_SCALE = 5.0
_REMEMBERED = 64  # decisions of the live pipeline from which each step learns
Layers = Mapping[str, ndarray]


class MachineSpeed(NamedTuple):
    """What the agent sees of the machine in addition to its cores and memory."""

    bytes_per_s: float
    """The bytes that memory can move in a second. 0: no limit."""
    speed: float
    """The speed of a core. 1: as the simulator's."""


@functools.cache
def measure_machine() -> MachineSpeed:
    """Measures this machine once, in some thirty milliseconds: a copy of memory, and a count in Python."""
    source = np.ones(1 << 25, np.uint8)
    copied_s, counted_s = (
        min(timeit.repeat(work, number=1, repeat=3))
        for work in (source.copy, lambda: sum(range(200_000)))
    )
    return MachineSpeed(2 * source.size / copied_s, 0.01 / counted_s)


class Transition(NamedTuple):
    """One decision and what followed."""

    inputs: ndarray
    chosen: ndarray
    """The number of the choice at each place."""
    gain: float
    after: ndarray
    """The inputs at the next look."""
    share: ndarray
    """The share of each place in the gain. Absent stages have none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntuneState:
    """The network as it has learned, and the last decision."""

    limits: Limits
    knobs: Knobs
    layers: Layers
    last: Snapshot | None = None
    decided: tuple[ndarray, ndarray] | None = None
    """The inputs of the last decision, and the number of the choice at each place."""
    reward: float = 0.0
    best: float = 0.0
    """The best rate so far."""
    seen: tuple[Transition, ...] = ()


class InTune(Policy):
    """Takes the steps with the highest values, and learns from what they brought."""

    name = "intune"

    def __init__(
        self, layers: Layers | None = None, *, machine: MachineSpeed | None = None
    ) -> None:
        """By default, it has the weights of the package, and measures this machine."""
        self._layers = layers or load()
        self._machine = machine or measure_machine()

    def made_of(self) -> dict[str, Any]:
        return {"weights": digest(*self._layers.values()), "machine": self._machine._asdict()}

    def initial(self, limits: Limits, knobs: Knobs) -> IntuneState:
        return IntuneState(limits=limits, knobs=limits.clamp(knobs), layers=self._layers)

    def decide(self, snapshot: Snapshot, state: IntuneState) -> tuple[Knobs, IntuneState, Reason]:
        measured = rates(state.last, snapshot) if state.last else None
        state = replace(state, last=snapshot)
        if measured is None or not snapshot.rows:
            return state.knobs, state, Reason(text="nothing was measured yet")
        inputs = observe(measured, snapshot, state.knobs, self._machine)
        state = follow(state, inputs, measured)
        if state.seen:
            state = replace(state, layers=self.learn(state))
        chosen = self.choose(values(state.layers, inputs[None])[0])
        steps = [STEPS[i] for i in chosen[: min(STAGES, len(state.limits.workers))]]
        factor = FACTORS[chosen[-1]]
        knobs = move(state.knobs, state.limits, steps, factor, snapshot.cpu_quota)
        done = moves(state.knobs.to_dict(), knobs.to_dict()) or "nothing changes"
        text = (
            f"the network wants steps of {steps} and {factor:g} times the prefetched bytes: {done}"
        )
        return knobs, replace(state, knobs=knobs, decided=(inputs, chosen)), Reason(text=text)

    def learn(self, state: IntuneState) -> Layers:
        """Returns the layers after a step of learning from the latest decisions."""
        return learned(state.layers, state.seen)

    def choose(self, values: ndarray) -> ndarray:
        """Returns the number of the choice at each place, from the values of all choices there."""
        chosen: ndarray = values.argmax(axis=1)
        return chosen


def reward(rows_per_s: float, used: float, limit: float) -> float:
    """Returns the throughput times the free share of the memory. It is never below 0."""
    return rows_per_s * max(0.0, 1 - used / limit)


def follow(state: IntuneState, inputs: ndarray, measured: PipelineRates) -> IntuneState:
    """Returns the state with what followed the last decision."""
    now = reward(measured.rows_per_s, measured.memory_used, measured.memory_limit)
    best = max(state.best, measured.rows_per_s)
    gain = _GAIN_SCALE * (now - state.reward) / max(best, 1e-9)
    state = replace(state, reward=now, best=best)
    if state.decided is None:
        return state
    present = np.arange(PLACES) < len(state.limits.workers)
    present[STAGES:] = True
    latest = Transition(*state.decided, gain, inputs, present / present.sum())
    return replace(state, seen=(*state.seen, latest)[-_REMEMBERED:])


def observe(
    measured: PipelineRates, snapshot: Snapshot, knobs: Knobs, machine: MachineSpeed
) -> ndarray:
    """Returns the network's inputs. Latencies are relative to the slowest stage, so they show the balance."""
    batches = max(1, snapshot.batches)
    latencies = [
        stage.busy / stage.rows_per_s / stage.workers * snapshot.rows / batches
        if stage.rows_per_s > 0
        else 0.0
        for stage in measured.stages.values()
    ]
    model = snapshot.consumer_compute_s / batches
    slowest = max([*latencies, 1e-12])
    *stages, model = (math.log(max(s / slowest, 1e-3)) + 7 for s in (*latencies[:STAGES], model))
    workers = sum(stage.workers for stage in measured.stages.values())
    memory = machine.bytes_per_s
    values = (
        *stages,
        *[0.0] * (STAGES - len(stages)),
        max(-1.0, 1 - workers / max(1e-9, measured.cpu_quota)),
        1 - measured.memory_used / measured.memory_limit,
        model,
        2.0 if memory <= 0 else min(2.0, max(-4.0, math.log10(memory / 1e10))),
        math.log(machine.speed),
        math.log2(max(knobs.prefetch_bytes, 1) / measured.memory_limit) / 4 + 2,
    )
    return np.array(values, dtype=np.float32)


def move(knobs: Knobs, limits: Limits, steps: Sequence[int], factor: float, cores: float) -> Knobs:
    """Returns the knobs after one step in each stage, and with `factor` times the prefetched bytes.

    Steps down come first. If all workers together would exceed the cores, steps up are cut, the last stage's first."""
    workers = dict(knobs.workers)
    pairs = zip(limits.workers, steps, strict=False)
    for name, step in sorted(pairs, key=lambda pair: pair[1] > 0):
        low, high = limits.workers[name]
        room = max(0, math.floor(cores) - sum(workers.values()))
        workers[name] = min(max(workers[name] + min(step, room), low), high)
    prefetched = max(1, int(factor * knobs.prefetch_bytes))
    return limits.clamp(replace(knobs, workers=workers, prefetch_bytes=prefetched))


def values(layers: Layers, inputs: ndarray) -> ndarray:
    """Returns the value of each choice at each place: inputs × place × choice."""
    return _forward(layers, inputs)[-1].reshape(-1, PLACES, len(STEPS))


def _forward(layers: Layers, inputs: ndarray) -> list[ndarray]:
    """Returns the input of each layer, and last the output."""
    passed = [inputs]
    for i in range(len(SIZES) - 1):
        passed[i] = np.maximum(passed[i], 0) if i else inputs
        passed.append(passed[i] @ layers[f"weight{i}"].T + layers[f"bias{i}"])
    return passed


def learned(layers: Layers, seen: Sequence[Transition], rate: float = RATE) -> Layers:
    """Returns the layers after one step of gradient descent on the squared errors of Q-learning.

    A steeper gradient goes no further than one of length 1. Otherwise a surprise would undo what was taught."""
    inputs, chosen, gains, after, share = (np.stack(part) for part in zip(*seen, strict=True))
    passed = _forward(layers, inputs)
    judged, chosen = passed[-1].reshape(-1, PLACES, len(STEPS)), chosen[..., None]
    ahead = (values(layers, after).max(axis=2) * share).sum(axis=1)
    goals = (gains + _DISCOUNT * ahead)[:, None, None]
    errors = np.zeros_like(judged)
    off = np.take_along_axis(judged, chosen, 2) - goals
    np.put_along_axis(errors, chosen, (2 * share[..., None] * off / len(seen)).astype("f4"), 2)
    back, steps = errors.reshape(len(seen), -1), dict[str, ndarray]()
    for i in reversed(range(len(SIZES) - 1)):
        steps |= {f"weight{i}": back.T @ passed[i], f"bias{i}": back.sum(axis=0)}
        back = (back @ layers[f"weight{i}"]) * (passed[i] > 0)
    rate /= max(1.0, math.sqrt(sum(float((step**2).sum()) for step in steps.values())))
    return {name: layer - rate * steps[name] for name, layer in layers.items()}


def load() -> Layers:
    """Returns the weights and biases of the package."""
    return read(WEIGHTS, SHAPES, "git checkout benchmarks/rivals/intune.safetensors")[0]
