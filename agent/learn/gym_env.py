"""Simulated pipelines as a gymnasium environment: `Tuning`. An action is a kind of candidate, and a step one decision.

Where a kind is not available, or equals what the planner would do, its action is the planner's choice. The reward is
what the trainer took in the interval, in units of the pipeline's best rate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from sluice.agent.policies.learned.candidates import KINDS, STAGE_INPUTS, WHOLE_INPUTS, Candidate, candidates
from sluice.agent.policies.planner.planner import Planner
from sluice.agent.simulator.fluid import Simulator
from sluice.agent.simulator.optimum import best_knobs
from sluice.agent.simulator.physics import steady
from sluice.agent.simulator.random_pipelines import HELD_OUT_SEEDS, training
from sluice.agent.simulator.scenario import Scenario

STAGES = 9  # places for stages; a shorter pipeline leaves the last ones 0
_BOUND = 100.0


class Tuning(gymnasium.Env[np.ndarray, np.int64]):
    """The environment. `reset(seed=n)` starts a random pipeline of the training family, or `scenario(n)`."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  as gymnasium has it

    def __init__(self, scenario: Callable[[int], Scenario] = training) -> None:
        self._make = scenario
        self._planner = Planner()
        self.action_space = gymnasium.spaces.Discrete(len(KINDS))
        self.observation_space = gymnasium.spaces.Box(
            -_BOUND, _BOUND, (STAGES * STAGE_INPUTS + WHOLE_INPUTS,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None
              ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        number = int((options or {}).get("pipeline", self.np_random.integers(HELD_OUT_SEEDS)))
        self.scenario = self._make(number)
        self.simulator = Simulator(self.scenario.truth_at, self.scenario.limits, self.scenario.first_knobs, seed=number)
        truth, names = self.scenario.truth_at(0.0), list(self.scenario.limits.workers)
        best = best_knobs(truth, self.scenario.limits)
        self.unit = steady(truth, [best.workers[n] for n in names],
                           [best.backend.get(n, "thread") for n in names]).rates[-1]
        self._look(self._planner.initial(self.scenario.limits, self.simulator.knobs))
        return self._observation(), {}

    def _look(self, state: Any) -> None:
        self.found: list[Candidate] = candidates(self._planner, self.simulator.snapshot(), state)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        kind = KINDS[int(action)]
        chosen = next((one for one in self.found if one.kind == kind), self.found[0])
        rows = self.take(chosen)
        self._look(chosen.state)
        late = self.simulator.now >= self.scenario.seconds - 1e-9
        reward = rows / (self.unit * self.scenario.interval_s)
        return self._observation(), reward, self.simulator.killed, late, {"kind": chosen.kind}

    def take(self, chosen: Candidate) -> float:
        """Carries out a candidate and lets an interval pass; returns the rows that the trainer took."""
        before = self.simulator.consumed
        if chosen.knobs != self.simulator.knobs:
            self.simulator.apply(chosen.knobs)
        self.simulator.advance(self.scenario.interval_s)
        return self.simulator.consumed - before

    def try_out(self, chosen: Candidate, intervals: int) -> tuple[float, float]:
        """The rows and processor seconds if a candidate were chosen now and the planner went on; this pipeline does not
        change."""
        other = copy.copy(self)
        other.simulator = self.simulator.fork()
        rows, used, state = other.take(chosen), -self.simulator.used_s, chosen.state
        for _ in range(intervals - 1):
            knobs, state, _ = self._planner.decide(other.simulator.snapshot(), state)
            before = other.simulator.consumed
            if knobs != other.simulator.knobs:
                other.simulator.apply(knobs)
            other.simulator.advance(self.scenario.interval_s)
            rows += other.simulator.consumed - before
        return (0.0 if other.simulator.killed else rows), used + other.simulator.used_s

    def _observation(self) -> np.ndarray:
        stages = np.zeros((STAGES, STAGE_INPUTS))
        chosen = self.found[0]
        stages[:len(chosen.stages)] = chosen.stages[:STAGES]
        found = np.concatenate([stages.ravel(), chosen.whole])
        return np.asarray(np.clip(found, -_BOUND, _BOUND), np.float32)
