"""Simulates many pipelines for the learned policy: `Episodes`, and the best setting of each: `find_oracle_settings`.

A look holds only what a run's own snapshots and schema show. Costs, locks, cliffs and neighbours stay hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy import ndarray

from sluice.agent.lab.imitation import OracleSettings
from sluice.agent.lab.simulator.flow import steady
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.optimum import best_knobs
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.policies.opening.contract import Foreknowledge, PolicyInput
from sluice.agent.policies.opening.policy import Glimpse, Setting, knobs_of

_KNOWN = 0.7
"""How often a run knows a property before its first row."""
_WRONG = 0.1
"""How often a stage's class is wrong about its lock."""
_MEASURED = 0.25
"""How often a worker process has been measured before."""


def find_oracle_settings(scenarios: Sequence[Scenario], stages: int) -> OracleSettings:
    """Returns the best settings of these pipelines, from their true costs."""
    workers, process = np.ones((len(scenarios), stages)), np.zeros((len(scenarios), stages))
    sizes, rates = np.zeros((2, len(scenarios))), np.zeros(len(scenarios))
    for b, scenario in enumerate(scenarios):
        truth, own = scenario.truth_at(0.0), slice(stages - len(scenario.stages), None)
        best = best_knobs(truth, scenario.limits)
        workers[b, own] = [best.workers[s.name] for s in truth.stages]
        process[b, own] = [best.backend[s.name] == "process" for s in truth.stages]
        sizes[:, b] = best.read_ahead_bytes, best.prefetch_bytes
        rates[b] = steady(
            truth, list(workers[b, own]), [best.backend[s.name] for s in truth.stages]
        ).rates[-1]
    return OracleSettings(workers, process, sizes[0], sizes[1], rates)


class Episodes:
    """Some pipelines from their start on. The same seed gives the same course."""

    def __init__(self, scenarios: Sequence[Scenario], *, seed: int = 0, alike: int = 1) -> None:
        """Each pipeline runs `alike` times in parallel, with the same random events."""
        self._simulators = []
        self._known = []
        for number, scenario in enumerate(scenarios):
            known = _foreknowledge(scenario, np.random.default_rng((8, seed, number)))
            for _ in range(alike):
                self._known.append(known)
                self._simulators.append(
                    Simulator(
                        scenario.truth_at,
                        scenario.limits,
                        scenario.first_knobs,
                        seed=seed + number,
                    )
                )
        self._last = [simulator.snapshot() for simulator in self._simulators]
        self._inputs: list[PolicyInput] = []

    @property
    def rows(self) -> ndarray:
        """The rows that each trainer took so far; 0 if the pipeline was killed."""
        return np.array([0.0 if one.killed else one.consumed for one in self._simulators])

    @property
    def killed(self) -> ndarray:
        return np.array([one.killed for one in self._simulators])

    def pass_time(self, seconds: float) -> None:
        for simulator in self._simulators:
            simulator.advance(seconds)

    def look(self, seconds: float) -> Glimpse:
        """Lets time pass, and returns what happened since the last look."""
        self.pass_time(seconds)
        snapshots = [simulator.snapshot() for simulator in self._simulators]
        self._inputs = [
            PolicyInput(
                begun=begun,
                seen=seen,
                knobs=simulator.knobs,
                limits=simulator.limits,
                known=known,
                process_bytes=max(process_bytes, *(s.process_bytes for s in seen.stages)) or None,
            )
            for simulator, (known, process_bytes), begun, seen in zip(
                self._simulators, self._known, self._last, snapshots, strict=True
            )
        ]
        self._last = snapshots
        return _stack([Glimpse.of(given) for given in self._inputs])

    def act(self, setting: Setting) -> None:
        """Applies a setting for each pipeline, as of the last look."""
        for row, simulator in enumerate(self._simulators):
            simulator.apply(knobs_of(self._inputs[row], setting, row))


def _stack(looks: Sequence[Glimpse]) -> Glimpse:
    """Returns the looks of several pipelines as one, with each pipeline's last stage in the last column."""
    width = max(look.real.shape[1] for look in looks)

    def wide(values: ndarray, name: str) -> ndarray:
        if values.ndim == 1:
            return values
        empty = 1 if name in ("workers", "most") else 0
        return np.pad(values, [(0, 0), (width - values.shape[1], 0)], constant_values=empty)

    arrays: dict[str, Any] = {
        field.name: np.concatenate([wide(getattr(look, field.name), field.name) for look in looks])
        for field in fields(Glimpse)
        if field.name != "seconds"
    }
    return Glimpse(seconds=looks[0].seconds, **arrays)


def _foreknowledge(scenario: Scenario, draw: np.random.Generator) -> tuple[Foreknowledge, int]:
    """Returns what a run of this pipeline knows before the first row, and the bytes of a process if one was measured
    before (else 0)."""
    operators = {}
    process_bytes = 0
    for stage in scenario.stages[1:]:
        if stage.cpu > 0.5 and draw.random() < _KNOWN:
            holds_lock = (stage.lock > 0.3) != (draw.random() < _WRONG)
            operators[stage.name] = "python" if holds_lock else "vectorised"
        if len(stage.backends) > 1:
            process_bytes = int(stage.process_bytes)
    first = scenario.stages[0]
    width = first.bytes_per_row * float(np.exp(0.2 * draw.standard_normal()))
    knows_store, knows_width, knows_groups = draw.random(3) < _KNOWN
    store = "remote" if first.cpu < 0.5 else "local"
    known = Foreknowledge(
        row_bytes=width if knows_width else None,
        operators=operators,
        store=store if knows_store else None,
        row_group_rows=int(first.rows_per_item) if knows_groups else None,
    )
    return known, process_bytes if draw.random() < _MEASURED else 0
