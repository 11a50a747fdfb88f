"""`intune`: a reconstruction of InTune (RecSys'23), declared as such: its code and hyper-parameters are not public.

Taken from the publication: what the agent sees (the pipeline's latency, free processors and free memory, which it can
change; the model's latency, which it cannot; memory bandwidth and core speed, which are constants), its reward
(throughput × (1 − memory used / memory limit)), small steps up or down in each stage, three layers of ReLU, training
in a simulated pipeline first.
Ours: the latency is given per stage (seconds a batch, nine places, empty ones 0), so that pipelines of any length fit
one network; free processors are those that no worker was given; a step is one of −5, −1, 0, +1, +5 workers, and the
steps together stay within the processors; the values of the stages' steps are learned by deep Q-learning, each stage's
from the common reward; what is learned is not trained further on the live pipeline. Latencies are logarithms in units
of the slowest stage's, so that a pipeline a thousand times faster looks alike.
`sluice teach --policy intune` makes the weights again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sluice.agent.costs.rates import PipelineRates, rates
from sluice.agent.tunable import Policy, Reason
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

STAGES = 9
STEPS = (-5, -1, 0, 1, 5)
INPUTS = STAGES + 5
HIDDEN = 128
WEIGHTS = Path(__file__).with_name("intune.safetensors")
_BANDWIDTH = _SPEED = 0.0  # logarithms of constants, in units of the machine trained on


class IntuneWeightsError(ValueError):
    """A weights file that does not fit: its message says which and why."""


def reward(rows_per_s: float, used: float, limit: float) -> float:
    """Throughput × (1 − memory used / memory limit); never below 0, even where more is used than the limit."""
    return rows_per_s * max(0.0, 1 - used / limit)


def observe(rates: PipelineRates, snapshot: Snapshot, *, model_latency: bool = True) -> np.ndarray:
    """The network's inputs. Latencies are in units of the slowest stage's, so the balance shows and not the scale."""
    batch = snapshot.rows / max(1, snapshot.batches)
    latencies = [s.busy / s.rows_per_s / s.workers * batch if s.rows_per_s > 0 else 0.0 for s in rates.stages.values()]
    slowest = max([*latencies, 1e-12])
    values = [math.log(max(value / slowest, 1e-3)) + 7 for value in latencies[:STAGES]]
    model = snapshot.consumer_compute_s / max(1, snapshot.batches)
    values += [0.0] * (STAGES - len(values))
    given = sum(s.workers for s in rates.stages.values())
    values += [max(-1.0, 1 - given / max(1e-9, rates.cpu_quota)), 1 - rates.memory_used / rates.memory_limit,
               math.log(max(model / slowest, 1e-3)) + 7 if model_latency else 0.0, _BANDWIDTH, _SPEED]
    return np.array(values, dtype=np.float32)


def move(knobs: Knobs, limits: Limits, steps: list[int], cores: float) -> Knobs:
    """The knobs after one step in each stage, steps down first. If all together would exceed the cores, steps up are
    cut, beginning with the last stage; no stage falls below its least."""
    workers = dict(knobs.workers)
    for name, step in sorted(zip(limits.workers, steps, strict=False), key=lambda pair: pair[1] > 0):
        low, high = limits.workers[name]
        room = max(0, math.floor(cores) - sum(workers.values()))
        workers[name] = min(max(workers[name] + min(step, room), low), high)
    return replace(knobs, workers=workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntuneState:
    limits: Limits
    knobs: Knobs
    last: Snapshot | None = None


class InTune(Policy):
    name = "intune"

    def __init__(self, weights: Path = WEIGHTS, *, model_latency: bool = True) -> None:
        self._layers = load(weights)
        self._model_latency = model_latency

    def initial(self, limits: Limits, knobs: Knobs) -> IntuneState:
        return IntuneState(limits=limits, knobs=limits.clamp(knobs))

    def values(self, inputs: np.ndarray) -> np.ndarray:
        """The worth of each step in each stage: stage × step."""
        for weight, bias in self._layers[:-1]:
            inputs = np.maximum(weight @ inputs + bias, 0)
        weight, bias = self._layers[-1]
        return np.asarray(weight @ inputs + bias).reshape(STAGES, len(STEPS))

    def decide(self, snapshot: Snapshot, state: IntuneState) -> tuple[Knobs, IntuneState, Reason]:
        measured = rates(state.last, snapshot) if state.last else None
        state = replace(state, last=snapshot)
        if measured is None:
            return state.knobs, state, Reason(text="nothing was seen yet")
        values = self.values(observe(measured, snapshot, model_latency=self._model_latency))
        steps = [STEPS[int(i)] for i in values.argmax(axis=1)][:len(state.limits.workers)]
        knobs = state.limits.clamp(move(state.knobs, state.limits, steps, snapshot.cpu_quota))
        return knobs, replace(state, knobs=knobs), Reason(text=f"the network's steps are {steps}")


def load(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Loads the weight and bias of each layer. Raises IntuneWeightsError for a file that is not such a network."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    sizes = [INPUTS, HIDDEN, HIDDEN, HIDDEN, STAGES * len(STEPS)]
    try:
        tensors = load_file(path)
        layers = [(tensors[f"weight{i}"], tensors[f"bias{i}"]) for i in range(len(sizes) - 1)]
    except (OSError, SafetensorError, KeyError) as error:
        raise IntuneWeightsError(f"{path}: no weights of intune: {error}; `sluice teach --policy intune` makes "
                                 "them") from error
    for i, (weight, bias) in enumerate(layers):
        if weight.shape != (sizes[i + 1], sizes[i]) or bias.shape != (sizes[i + 1],):
            raise IntuneWeightsError(f"{path}: weight{i} is {weight.shape}, wanted is {(sizes[i + 1], sizes[i])}")
    return layers
