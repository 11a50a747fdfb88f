"""Trains `intune` in simulated pipelines by deep Q-learning, and chooses its live variant.

    python -m benchmarks.rivals.intune_teacher [--decisions N] [--seed N] [--out FILE]

Each episode is a random pipeline of the training families, with random first knobs and a random core speed. The reward
is the published one. Its throughput is in units of the pipeline's best rate. The evaluation uses other families.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from sluice.agent.costs.rates import rates
from sluice.agent.learn.adam import Adam
from sluice.agent.policies.opening.weights import write
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.optimum import best_knobs
from sluice.agent.simulator.physics import steady
from sluice.agent.simulator.random_pipelines import pipeline
from sluice.agent.simulator.rollout import reference, run
from sluice.agent.simulator.scenario import Scenario
from sluice.benchmarks.rivals.intune import (
    DISCOUNT,
    FACTORS,
    GAIN_SCALE,
    INPUTS,
    PLACES,
    SIZES,
    STAGES,
    STEPS,
    WEIGHTS,
    Hardware,
    InTune,
    Layers,
    move,
    observe,
    reward,
)
from sluice.common.program import run as program
from sluice.common.program import say

VARIANTS = {"not": 0.0, "slowly": 1e-4, "yes": 1e-3, "fast": 1e-2}
"""The learning rates in a live pipeline, by variant."""
_EPISODE = 60
_BATCH = 256
_EVERY = 4
_MEMORY = 40_000
_LEARNING_RATE = 5e-4
_TARGET_RATE = 0.01
_TAUGHT = 90_000  # lower numbers are for training; from here on, pipelines compare the variants


def lesson(number: int) -> Scenario:
    """Returns a training pipeline that fits the network. Every other pipeline changes during its run."""
    return pipeline("training", number, most_stages=STAGES, changing=number % 2 == 1)


def hardware_of(scenario: Scenario) -> Hardware:
    return Hardware(bytes_per_s=scenario.machine.bandwidth, speed=scenario.machine.speed)


@dataclass(slots=True)
class Replay:
    """The latest decisions."""

    inputs: ndarray
    steps: ndarray
    rewards: ndarray
    after: ndarray
    present: ndarray
    count: int = 0

    @classmethod
    def empty(cls, size: int) -> Replay:
        return cls(
            np.zeros((size, INPUTS), np.float32),
            np.zeros((size, PLACES), np.int64),
            np.zeros(size, np.float32),
            np.zeros((size, INPUTS), np.float32),
            np.zeros((size, PLACES), np.float32),
        )

    def add(
        self, inputs: ndarray, steps: ndarray, value: float, after: ndarray, stages: int
    ) -> None:
        i = self.count % len(self.rewards)
        self.inputs[i] = inputs
        self.steps[i] = steps
        self.rewards[i] = value
        self.after[i] = after
        self.present[i] = np.arange(PLACES) < stages
        self.present[i, STAGES:] = 1
        self.count += 1

    def sample(self, random: np.random.Generator) -> tuple[ndarray, ...]:
        """Draws decisions. The stages' places are shuffled because their order has no meaning."""
        rows = random.integers(min(self.count, len(self.rewards)), size=(_BATCH, 1))
        stages = random.permuted(np.tile(np.arange(STAGES), (_BATCH, 1)), axis=1)
        places, wide = (
            np.concatenate([stages, np.tile(np.arange(STAGES, count), (_BATCH, 1))], axis=1)
            for count in (PLACES, INPUTS)
        )
        return (
            self.inputs[rows, wide],
            self.steps[rows, places],
            self.rewards[rows[:, 0]],
            self.after[rows, wide],
            self.present[rows, places],
        )


def learn(
    decisions: int,
    seed: int,
    *,
    model_latency: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Layers, float]:
    """Returns the trained network, and its mean reward over the last fifth of the decisions. The same seed gives the
    same result."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network is slower on several, and the sums differ
    try:
        return _learn(decisions, seed, model_latency, say)
    finally:
        torch.set_num_threads(threads)


def _learn(
    decisions: int, seed: int, model_latency: bool, say: Callable[[str], None]
) -> tuple[Layers, float]:
    import torch

    torch.manual_seed(seed)
    random = np.random.default_rng((3, seed))
    network = _network()
    target = _network()
    target.load_state_dict(network.state_dict())
    optimiser = Adam(list(network.parameters()), _LEARNING_RATE)
    replay, rewards = Replay.empty(_MEMORY), []
    pipeline = _Episode(random, model_latency)
    for decision in range(decisions):
        chance = max(0.05, 1 - decision / (0.5 * decisions))
        with torch.no_grad():
            values = network(torch.from_numpy(pipeline.inputs)).reshape(PLACES, len(STEPS)).numpy()
        steps = values.argmax(axis=1)
        explore = random.random(PLACES) < chance
        steps[explore] = random.integers(len(STEPS), size=int(explore.sum()))
        before = pipeline.inputs
        value = pipeline.step(steps)
        # Gains rank policies in the same order as rewards do, with less noise.
        replay.add(
            before,
            steps,
            GAIN_SCALE * (value - pipeline.last_reward),
            pipeline.inputs,
            pipeline.stages,
        )
        pipeline.last_reward = value
        rewards.append(value)
        if pipeline.age >= _EPISODE:
            pipeline = _Episode(random, model_latency)
        if decision >= _BATCH and decision % _EVERY == 0:
            _descend(network, target, optimiser, replay.sample(random))
        if (decision + 1) % max(1, decisions // 10) == 0:
            say(
                f"{decision + 1:,} of {decisions:,} decisions: mean reward {np.mean(rewards[-decisions // 10 :]):.3f}"
            )
    linear = [m for m in network if hasattr(m, "weight")]
    return (
        tuple((m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy()) for m in linear),
        float(np.mean(rewards[-max(1, len(rewards) // 5) :])),
    )


def _descend(network: Any, target: Any, optimiser: Adam, batch: Iterable[ndarray]) -> None:
    """Runs one step of Q-learning, and moves the target network towards the trained one."""
    import torch

    inputs, taken, gained, after, present = map(torch.from_numpy, batch)
    share = present / present.sum(1, keepdim=True)
    with torch.no_grad():
        ahead = target(after).reshape(-1, PLACES, len(STEPS)).amax(2)
        goal = gained + DISCOUNT * (ahead * share).sum(1)
    values = network(inputs).reshape(-1, PLACES, len(STEPS))
    chosen = values.gather(2, taken[:, :, None])[:, :, 0]
    loss = (share * (chosen - goal[:, None]) ** 2).sum(1).mean()
    with torch.no_grad():
        optimiser.step(torch.autograd.grad(loss, optimiser.weights))
        for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
            slow.lerp_(fast, _TARGET_RATE)


def _network() -> Any:
    import torch

    layers: list[torch.nn.Module] = []
    for a, b in itertools.pairwise(SIZES):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class _Episode:
    """A random pipeline with random first knobs, and one decision a second."""

    def __init__(self, random: np.random.Generator, model_latency: bool) -> None:
        scenario = lesson(int(random.integers(_TAUGHT)))
        machine = dataclasses.replace(scenario.machine, speed=float(2 ** random.uniform(-1, 1)))
        scenario = dataclasses.replace(scenario, machine=machine)
        truth, self.limits = scenario.truth_at(0.0), scenario.limits
        best = best_knobs(truth, self.limits)
        names = list(self.limits.workers)
        self._unit = steady(
            truth, [best.workers[n] for n in names], [best.backend.get(n, "thread") for n in names]
        ).rates[-1]
        share = float(random.random()) ** 2
        cores = machine.cores
        knobs = self.limits.clamp(
            dataclasses.replace(
                scenario.first_knobs.with_workers(
                    **{
                        n: max(1, int(share * cores / len(names) * random.uniform(0, 2)))
                        for n in names
                    }
                ),
                prefetch_bytes=int(
                    scenario.first_knobs.prefetch_bytes * 2 ** random.uniform(-4, 4)
                ),
            )
        )
        self._simulator = Simulator(
            scenario.truth_at, self.limits, knobs, seed=int(random.integers(2**31))
        )
        self._machine, self._model_latency = hardware_of(scenario), model_latency
        self.stages, self.age = len(names), 0
        self._simulator.advance(1.0)
        self._last = self._simulator.snapshot()
        self.inputs = np.zeros(INPUTS, np.float32)
        self.last_reward = self.step(np.full(PLACES, STEPS.index(0)))

    def step(self, chosen: ndarray) -> float:
        simulator = self._simulator
        simulator.apply(
            move(
                simulator.knobs,
                self.limits,
                [STEPS[i] for i in chosen[: self.stages]],
                FACTORS[chosen[-1]],
                self._last.cpu_quota,
            )
        )
        simulator.advance(1.0)
        snapshot = simulator.snapshot()
        measured = rates(self._last, snapshot)
        assert measured is not None
        self._last, self.age = snapshot, self.age + 1
        self.inputs = observe(
            measured, snapshot, simulator.knobs, self._machine, model_latency=self._model_latency
        )
        return reward(measured.rows_per_s / self._unit, measured.memory_used, measured.memory_limit)


def compare_variants(
    layers: Layers, pipelines: int, variants: Sequence[str], *, model_latency: bool = True
) -> dict[str, dict[str, float]]:
    """Returns each live variant's rows, as shares of the oracle's. The pipelines are of the training families but not
    used in training. The best variant is chosen by them and not by those of the evaluation."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(_TAUGHT, _TAUGHT + pipelines):
        scenario = lesson(number)
        best = reference(scenario, seed=number).rows
        for name in variants:
            policy = InTune(
                layers,
                machine=hardware_of(scenario),
                model_latency=model_latency,
                rate=VARIANTS[name],
            )
            found[name].append(run(scenario, policy, seed=number).rows / max(1e-9, best))
    return {
        name: {
            "median": round(float(np.median(v)), 4),
            "mean": round(float(np.mean(v)), 4),
            "p5": round(float(np.quantile(v, 0.05)), 4),
        }
        for name, v in found.items()
    }


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals.intune_teacher",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--decisions", type=int, default=320_000, help="to learn from (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides first weights and pipelines")
    parser.add_argument(
        "--without-model-latency", action="store_true", help="hide that input: the ablation"
    )
    parser.add_argument(
        "--validated",
        type=int,
        default=40,
        help="pipelines on which its live variants are compared (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=WEIGHTS, help="weights file (default: the one in use)"
    )
    options = parser.parse_args(argv)
    seen = not options.without_model_latency
    layers, mean = learn(options.decisions, options.seed, model_latency=seen, say=say)
    table = compare_variants(layers, options.validated, list(VARIANTS), model_latency=seen)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.rivals.intune_teacher", *argv]),
        "seed": options.seed,
        "decisions": options.decisions,
        "reward": mean,
        "table": table,
    }
    tensors = {
        f"{kind}{i}": tensor
        for i, layer in enumerate(layers)
        for kind, tensor in zip(("weight", "bias"), layer, strict=True)
    }
    write(options.out, tensors, record)
    return {"weights": str(options.out), "reward": mean, "table": table}


if __name__ == "__main__":
    program(main)
