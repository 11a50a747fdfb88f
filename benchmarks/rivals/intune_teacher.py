"""`python -m sluice.benchmarks.rivals.intune_teacher`: teaches the network of `intune` in simulated pipelines.

It learns as the policy does in a live pipeline, by the same step of Q-learning, but from the decisions of all pipelines
so far. And it explores: a choice is drawn at random, with a chance that falls to 5 % over the first half of them.
"""

from __future__ import annotations

import itertools
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.lab.simulator.rollout import run
from sluice.benchmarks.rivals.intune import (
    PLACES,
    SIZES,
    STAGES,
    STEPS,
    WEIGHTS,
    InTune,
    IntuneState,
    Layers,
    MachineSpeed,
    Transition,
    learned,
)
from sluice.benchmarks.rivals.weights import write
from sluice.common.lines import say
from sluice.common.program import run as program
from sluice.common.settings import parse, setting

_REMEMBERED, _BATCH, _LEAST_CHANCE = 40_000, 64, 0.05


@dataclass(frozen=True, kw_only=True)
class IntuneTeachingOptions:
    """The options of `python -m sluice.benchmarks.rivals.intune_teacher`."""

    title = "what"
    pipelines: int = setting(4000, "simulated pipelines to learn in", least=1)
    seed: int = setting(0, "decides the first weights and what is tried", least=0)
    out: Path = setting(WEIGHTS, "weights file", metavar="FILE")


class Explorer(InTune):
    """`intune` that tries things, and remembers what they brought in all pipelines."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng((3, seed))
        super().__init__(fresh(self.random), machine=MachineSpeed(0.0, 1.0))
        self.chance = 1.0
        self.remembered: deque[Transition] = deque(maxlen=_REMEMBERED)

    @property
    def layers(self) -> Layers:
        return self._layers

    def learn(self, state: IntuneState) -> Layers:
        self.remembered.append(state.seen[-1])
        drawn = self.random.integers(len(self.remembered), size=_BATCH)
        sample = [shuffled(self.remembered[i], self.random) for i in drawn]
        self._layers = learned(self._layers, sample)
        return self._layers

    def choose(self, values: ndarray) -> ndarray:
        tried = self.random.integers(len(STEPS), size=PLACES)
        return np.where(self.random.random(PLACES) < self.chance, tried, super().choose(values))


def fresh(random: np.random.Generator) -> Layers:
    """Returns layers whose outputs spread as widely as their inputs."""
    layers: dict[str, ndarray] = {}
    for i, (less, more) in enumerate(itertools.pairwise(SIZES)):
        layers[f"weight{i}"] = random.normal(0, (2 / less) ** 0.5, (more, less)).astype("f4")
        layers[f"bias{i}"] = np.zeros(more, np.float32)
    return layers


def shuffled(seen: Transition, random: np.random.Generator) -> Transition:
    """Returns a decision with its stages in another order, which has no meaning."""
    order = random.permutation(STAGES)
    inputs, chosen, after, share = (
        np.concatenate([part[order], part[STAGES:]])
        for part in (seen.inputs, seen.chosen, seen.after, seen.share)
    )
    return Transition(inputs, chosen, seen.gain, after, share)


def teach(pipelines: int, seed: int) -> Explorer:
    """Returns the policy after so many training pipelines. Every other one changes during its run."""
    explorer = Explorer(seed)
    for number in range(pipelines):
        explorer.chance = max(_LEAST_CHANCE, 1 - 2 * number / pipelines)
        scenario = pipeline("training", number, most_stages=STAGES, changing=number % 2 == 1)
        run(scenario, explorer, seed=number)
        if (number + 1) % max(1, pipelines // 10) == 0:
            say(f"{number + 1} of {pipelines} pipelines")
    return explorer


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    name = "python -m sluice.benchmarks.rivals.intune_teacher"
    options = parse(IntuneTeachingOptions, argv, name, description=__doc__)
    explorer = teach(options.pipelines, options.seed)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join([*name.split(), *argv]),
        "decisions": len(explorer.remembered),
    }
    write(options.out, explorer.layers, record)
    return {"weights": str(options.out), "decisions": record["decisions"]}


if __name__ == "__main__":
    program(main)
