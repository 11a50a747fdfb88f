"""Teaches `intune` in simulated pipelines of the training family, by deep Q-learning.

Each episode is a random pipeline from a random start; the reward is the published one, with the throughput in units of
the best that the pipeline can do. The held-out pipelines of the evaluation are from another generator and never shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sluice.agent.costs.rates import rates
from sluice.agent.learn.adam import Adam
from sluice.agent.policies.intune import HIDDEN, INPUTS, STAGES, STEPS, move, observe, reward
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.optimum import best_knobs
from sluice.agent.simulator.physics import steady
from sluice.agent.simulator.random_pipelines import training

_EPISODE = 60
_DISCOUNT = 0.8
_BATCH, _EVERY, _MEMORY = 256, 4, 40_000
_LEARNING_RATE = 5e-4
_TARGET_RATE = 0.01
_GAIN_SCALE = 5.0


@dataclass(slots=True)
class Replay:
    """A memory of past decisions; the oldest are forgotten first."""

    inputs: np.ndarray
    steps: np.ndarray
    rewards: np.ndarray
    after: np.ndarray
    present: np.ndarray
    count: int = 0

    @classmethod
    def empty(cls, size: int) -> Replay:
        return cls(np.zeros((size, INPUTS), np.float32), np.zeros((size, STAGES), np.int64),
                   np.zeros(size, np.float32), np.zeros((size, INPUTS), np.float32),
                   np.zeros((size, STAGES), np.float32))

    def add(self, inputs: np.ndarray, steps: np.ndarray, value: float, after: np.ndarray, stages: int) -> None:
        i = self.count % len(self.rewards)
        self.inputs[i], self.steps[i], self.rewards[i], self.after[i] = inputs, steps, value, after
        self.present[i] = np.arange(STAGES) < stages
        self.count += 1

    def sample(self, random: np.random.Generator) -> Iterator[np.ndarray]:
        """Draws some of them, with the stages' places shuffled, as the order of stages means nothing."""
        rows = random.integers(min(self.count, len(self.rewards)), size=(_BATCH, 1))
        places = random.permuted(np.tile(np.arange(STAGES), (_BATCH, 1)), axis=1)
        wide = np.concatenate([places, np.tile(np.arange(STAGES, INPUTS), (_BATCH, 1))], axis=1)
        return iter((self.inputs[rows, wide], self.steps[rows, places], self.rewards[rows[:, 0]],
                     self.after[rows, wide], self.present[rows, places]))


def learn(decisions: int, seed: int, *, model_latency: bool = True) -> tuple[Any, float]:
    """The trained network and its mean reward over the last fifth of the decisions. The same seed gives the same
    result."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network is slower on several, and the sums differ
    try:
        return _learn(decisions, seed, model_latency)
    finally:
        torch.set_num_threads(threads)


def _learn(decisions: int, seed: int, model_latency: bool) -> tuple[Any, float]:
    import torch

    torch.manual_seed(seed)
    random = np.random.default_rng((3, seed))
    sizes = [INPUTS, HIDDEN, HIDDEN, HIDDEN]
    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(HIDDEN, STAGES * len(STEPS)))
    target = torch.nn.Sequential(*[torch.nn.Linear(m.in_features, m.out_features) if isinstance(m, torch.nn.Linear)
                                   else torch.nn.ReLU() for m in network])
    target.load_state_dict(network.state_dict())
    optimiser = Adam(list(network.parameters()), _LEARNING_RATE)
    replay, rewards = Replay.empty(_MEMORY), []
    pipeline = _Episode(random, model_latency)
    for decision in range(decisions):
        chance = max(0.05, 1 - decision / (0.5 * decisions))
        with torch.no_grad():
            values = network(torch.from_numpy(pipeline.inputs)).reshape(STAGES, len(STEPS)).numpy()
        steps = values.argmax(axis=1)
        explore = random.random(STAGES) < chance
        steps[explore] = random.integers(len(STEPS), size=int(explore.sum()))
        before = pipeline.inputs
        value = pipeline.step([STEPS[i] for i in steps])
        # Learned from the gains: their discounted sum ranks policies as that of the rewards does, with less noise.
        replay.add(before, steps, _GAIN_SCALE * (value - pipeline.last_reward), pipeline.inputs, pipeline.stages)
        pipeline.last_reward = value
        rewards.append(value)
        if pipeline.age >= _EPISODE:
            pipeline = _Episode(random, model_latency)
        if decision >= _BATCH and decision % _EVERY == 0:
            inputs, taken, gained, after, present = (torch.from_numpy(a) for a in replay.sample(random))
            share = present / present.sum(1, keepdim=True)
            with torch.no_grad():
                ahead = target(after).reshape(-1, STAGES, len(STEPS)).amax(2)
                goal = gained + _DISCOUNT * (ahead * share).sum(1)
            chosen = network(inputs).reshape(-1, STAGES, len(STEPS)).gather(2, taken[:, :, None])[:, :, 0]
            loss = (share * (chosen - goal[:, None]) ** 2).sum(1).mean()
            with torch.no_grad():
                optimiser.step(torch.autograd.grad(loss, optimiser.weights))
                for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
                    slow.lerp_(fast, _TARGET_RATE)
    return network, float(np.mean(rewards[-max(1, len(rewards) // 5):]))


class _Episode:
    """A random pipeline from a random start, one decision a second."""

    def __init__(self, random: np.random.Generator, model_latency: bool) -> None:
        scenario = training(int(random.integers(100_000)))
        truth, self.limits = scenario.truth_at(0.0), scenario.limits
        best = best_knobs(truth, self.limits)
        names = list(self.limits.workers)
        self._unit = steady(truth, [best.workers[n] for n in names],
                            [best.backend.get(n, "thread") for n in names]).rates[-1]
        share = float(random.random()) ** 2
        cores = scenario.machine.cores
        knobs = self.limits.clamp(scenario.first_knobs.with_workers(
            **{n: max(1, int(share * cores / len(names) * random.uniform(0, 2))) for n in names}))
        self._simulator = Simulator(scenario.truth_at, self.limits, knobs, seed=int(random.integers(2**31)))
        self._model_latency, self.stages, self.age = model_latency, len(names), 0
        self._simulator.advance(1.0)
        self._last = self._simulator.snapshot()
        self.inputs = np.zeros(INPUTS, np.float32)
        self.last_reward = self.step([0] * len(names))

    def step(self, steps: list[int]) -> float:
        simulator = self._simulator
        simulator.apply(move(simulator.knobs, self.limits, steps, self._last.cpu_quota))
        simulator.advance(1.0)
        snapshot = simulator.snapshot()
        measured = rates(self._last, snapshot)
        assert measured is not None
        self._last, self.age = snapshot, self.age + 1
        self.inputs = observe(measured, snapshot, model_latency=self._model_latency)
        return reward(measured.rows_per_s / self._unit, measured.memory_used, measured.memory_limit)


def save(network: Any, path: Path) -> None:
    from safetensors.numpy import save_file

    linear = [m for m in network if hasattr(m, "weight")]
    save_file({f"{kind}{i}": getattr(m, kind).detach().numpy() for i, m in enumerate(linear)
               for kind in ("weight", "bias")}, path)
