"""A gymnasium environment with one pipeline whose knobs are set directly: `OpeningEnv`.

It uses the same simulator, inputs and rewards as the training."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sluice.agent.learn.episodes import Episodes, OracleSettings
from sluice.agent.learn.opening_teacher import STAGES
from sluice.agent.policies.opening.policy import (
    FARTHEST,
    PIPELINE_INPUTS,
    STAGE_INPUTS,
    Answers,
    Inputs,
    observe,
    setting,
)
from sluice.agent.simulator.random_pipelines import pipeline

_HIGHEST = 10.0
_FIRST_LOOK_S = 0.25
_LOOKS = 8


class OpeningEnv(gymnasium.Env[dict[str, Any], dict[str, Any]]):
    """A pipeline that runs for eight seconds, or until it is killed for memory.

    - An observation has what a run's snapshots and schema show. A pipeline's last stage is in the last of twelve
      places.
    - An action corrects the plain estimate of each stage's workers and of both buffers. Corrections are logarithms, in
      units of the largest correction. The action also chooses the stages that run in processes.
    - The reward is the rows of the next second, in units of the best rate."""

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own form

    def __init__(self, split: str = "training", pipelines: int = 20_000) -> None:
        self._split, self._pipelines = split, pipelines
        self.observation_space = spaces.Dict(
            {
                "stages": spaces.Box(-_HIGHEST, _HIGHEST, (STAGES, len(STAGE_INPUTS)), np.float32),
                "pipeline": spaces.Box(-_HIGHEST, _HIGHEST, (len(PIPELINE_INPUTS),), np.float32),
                "real": spaces.MultiBinary(STAGES),
            }
        )
        self.action_space = spaces.Dict(
            {
                "workers": spaces.Box(-1, 1, (STAGES,), np.float32),
                "process": spaces.MultiBinary(STAGES),
                "buffers": spaces.Box(-1, 1, (2,), np.float32),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Starts a random pipeline, or the one that `options={"number": …}` names."""
        super().reset(seed=seed)
        number = int((options or {}).get("number", self.np_random.integers(self._pipelines)))
        scenario = pipeline(self._split, number)
        self._unit = float(OracleSettings.of([scenario], STAGES).rows_per_s[0])
        self._episodes, self._looks = (
            Episodes([scenario], seed=int(self.np_random.integers(2**31))),
            0,
        )
        return self._look(_FIRST_LOOK_S), {"number": number, "best_rows_per_s": self._unit}

    def step(
        self, action: dict[str, Any]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        own = slice(STAGES - self._glimpse.real.shape[1], None)
        answers = Answers(
            FARTHEST * action["workers"][None, own],
            FARTHEST * (2.0 * action["process"][None, own] - 1),
            FARTHEST * np.append(action["buffers"], 0.0)[None],
        )
        self._episodes.act(setting(self._glimpse, self._inputs, answers))
        before = self._episodes.rows[0]
        observation = self._look(1.0)
        self._looks += 1
        brought = max(0.0, float(self._episodes.rows[0] - before)) / self._unit
        return observation, brought, bool(self._episodes.killed[0]), self._looks >= _LOOKS, {}

    def _look(self, seconds: float) -> dict[str, Any]:
        self._glimpse = self._episodes.look(seconds)
        self._inputs: Inputs = observe(self._glimpse)
        empty = STAGES - self._glimpse.real.shape[1]
        return {
            "stages": np.clip(
                np.pad(self._inputs.stages[0], [(empty, 0), (0, 0)]), -_HIGHEST, _HIGHEST
            ),
            "pipeline": np.clip(self._inputs.pipelines[0], -_HIGHEST, _HIGHEST),
            "real": np.pad(self._glimpse.real[0], (empty, 0)).astype(np.int8),
        }
