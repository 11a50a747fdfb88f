"""Simulates many pipelines at once for the learned policy: `Episodes`, and the best setting of each: `OracleSettings`.

A look holds only what a run's own snapshots and schema show. Costs, locks, cliffs and neighbours stay hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from sluice.agent.learn.pipeline_batch import BatchKnobs, PipelineBatch
from sluice.agent.policies.opening.policy import Glimpse, Setting
from sluice.agent.simulator.optimum import best_knobs
from sluice.agent.simulator.physics import steady
from sluice.agent.simulator.scenario import Scenario

_OF_STAGES = ("done", "bytes", "busy_s", "cpu_s", "core_wait_s", "in_s", "out_s")
_OF_PIPELINES = ("consumed", "wait_s", "compute_s", "used_s")
_KNOWN = 0.7
"""How often a run knows a property before its first row."""
_WRONG = 0.1
"""How often a stage's class is wrong about its lock."""
_MEASURED = 0.25
"""How often a worker process has been measured before."""


class OracleSettings(NamedTuple):
    """The best settings of some pipelines whose true costs are known.

    Arrays are pipeline × stage, or have one value for each pipeline. A pipeline's last stage is in the last column."""

    workers: ndarray
    process: ndarray
    read_ahead_bytes: ndarray
    prefetch_bytes: ndarray
    rows_per_s: ndarray

    @classmethod
    def of(cls, scenarios: Sequence[Scenario], stages: int) -> OracleSettings:
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
        return cls(workers, process, sizes[0], sizes[1], rates)


class Episodes:
    """Some pipelines from their start on. The same seed gives the same course."""

    def __init__(self, scenarios: Sequence[Scenario], *, seed: int = 0, alike: int = 1) -> None:
        """Each pipeline runs `alike` times in parallel, with the same random events."""
        repeated = [s for s in scenarios for _ in range(alike)]
        self._batch = PipelineBatch(repeated, seed=seed, alike=alike)
        self._known = {
            name: np.repeat(values, alike, axis=0)
            for name, values in _foreknowledge(scenarios, self._batch.real.shape[0], seed).items()
        }
        self._batch_rows = np.array([float(s.consumer.batch_rows) for s in repeated])
        self._before = self._counters()

    @property
    def knobs(self) -> BatchKnobs:
        return self._batch.knobs

    @property
    def rows(self) -> ndarray:
        """The rows that each trainer took so far; 0 if the pipeline was killed."""
        return np.where(self._batch.killed, 0.0, self._batch.consumed)

    @property
    def killed(self) -> ndarray:
        return self._batch.killed

    def pass_time(self, seconds: float) -> None:
        self._batch.advance(seconds)

    def look(self, seconds: float) -> Glimpse:
        """Lets time pass, and returns what happened since the last look."""
        self._batch.advance(seconds)
        batch = self._batch
        now = self._counters()
        then = self._before
        self._before = now
        spent = {
            name: now[name] - then[name] for name in now if name not in ("done", "bytes", "at")
        }
        rows, items = (
            np.floor(now["done"]),
            np.maximum(1.0, np.floor(now["done"] / batch.rows_per_item.T)),
        )
        limits = np.maximum(1e-9, batch.queue_limits().T)
        return Glimpse(
            seconds=float(now["at"] - then["at"]),
            real=batch.real.T.copy(),
            rows=rows - np.floor(then["done"]),
            item_bytes=now["bytes"] / items,
            row_bytes=now["bytes"] / np.maximum(1.0, rows),
            fill=np.minimum(1.0, batch.queue.T / limits),
            workers=batch.knobs.workers.T.copy(),
            most=batch.most.T,
            process=batch.knobs.process.T.copy(),
            movable=batch.movable.T,
            read_ahead_bytes=batch.knobs.read_ahead_bytes.copy(),
            prefetch_bytes=batch.knobs.prefetch_bytes.copy(),
            cores=batch.cores.copy(),
            memory_used=batch.memory.copy(),
            memory_limit=batch.memory_limit.copy(),
            batch_rows=self._batch_rows,
            **spent,
            **self._known,
        )

    def act(self, setting: Setting) -> None:
        self._batch.apply(
            BatchKnobs(
                setting.workers.T,
                setting.process.T.astype(bool),
                setting.read_ahead_bytes,
                setting.prefetch_bytes,
            )
        )

    def _counters(self) -> dict[str, ndarray]:
        return {
            **{name: getattr(self._batch, name).T.copy() for name in _OF_STAGES},
            **{name: getattr(self._batch, name).copy() for name in _OF_PIPELINES},
            "at": np.float64(self._batch.now),
        }


def _foreknowledge(scenarios: Sequence[Scenario], stages: int, seed: int) -> dict[str, ndarray]:
    """Returns what runs of these pipelines know before the first row. NaN: unknown."""
    draw = np.random.default_rng((8, seed))

    def known(share: float, *shape: int) -> ndarray:
        return np.where(draw.random(shape) < share, 1.0, np.nan)

    count = len(scenarios)
    lock, sizes = np.full((count, stages), np.nan), np.full(count, np.nan)
    for b, scenario in enumerate(scenarios):
        first = stages - len(scenario.stages)
        for i, stage in enumerate(scenario.stages, first):
            if i > first and stage.cpu > 0.5:
                lock[b, i] = stage.lock
            if len(stage.backends) > 1:
                sizes[b] = stage.process_bytes
    wrong = draw.random((count, stages)) < _WRONG
    python = np.where(np.isnan(lock), np.nan, ((lock > 0.3) != wrong).astype(float))
    store = np.array([float(s.stages[0].cpu < 0.5) for s in scenarios])
    width = np.array([s.stages[0].bytes_per_row for s in scenarios]) * np.exp(
        0.2 * draw.standard_normal(count)
    )
    rows = np.array([float(s.stages[0].rows_per_item) for s in scenarios])
    return {
        "python": python * known(_KNOWN, count, stages),
        "remote": store * known(_KNOWN, count),
        "known_row_bytes": width * known(_KNOWN, count),
        "group_rows": rows * known(_KNOWN, count),
        "process_bytes": sizes * known(_MEASURED, count),
    }
