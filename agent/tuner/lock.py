"""Estimates which stages hold the interpreter's lock, and which wait for it: `LockModel`. Pure.

A stage that waits for another's lock is not slow: the holder is. The probe tells for which share of the time the lock
is held. It is the sum of the cores that each stage in threads uses, times the share of that time under the lock. So
each change of these cores tells more about the shares (a Kalman filter).

If the lock is nearly always held, its holders wait for each other. A stage that hardly holds it waits some milliseconds
an item. What is left of a stage's waiting is its own: for a store or a service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from sluice.agent.costs.rates import PipelineRates
from sluice.agent.tuner.settings import TunerSettings
from sluice.ingest.knobs import Limits
from sluice.ingest.stats import Snapshot

_PRIOR = {True: (0.5, 0.4), False: (0.03, 0.1)}
"""Whether a stage runs a function → the mean and the spread of the share of its processor time under the lock."""
_TRAINER = (0.03, 0.05)  # the same for the share of the time in which the trainer holds it
_NOISE = 0.03  # of a look at the lock
_DRIFT = 0.003  # by which a share may wander in a look
_SLACK = 0.005  # more of the time than was seen, the lock is not taken to be held
_FREE, _FULL = (
    0.7,
    0.9,
)  # below the first share nobody waits for long, above the second all holders do
_HOLDER = 0.1  # a stage with a smaller share of its time under the lock hardly holds it
_MOST_THREADS = 8.0  # more threads that want the lock waste no more of it


@dataclass(frozen=True, slots=True, kw_only=True)
class LockModel:
    """The share of each stage's processor time under the lock, last the trainer's share of all time."""

    names: tuple[str, ...]
    mean: ndarray
    covariance: ndarray
    cores: ndarray
    """The cores of each stage in threads at the last look, and 1 for the trainer."""
    held: float | None = None
    """The share of the time in which the lock was held then. None: not observed yet."""

    @classmethod
    def of(cls, limits: Limits) -> LockModel:
        """Returns what is believed before the first look."""
        functions = [limits.movable(n, "thread") for n in limits.workers]
        both = np.array([*(_PRIOR[f] for f in functions), _TRAINER])
        return cls(
            names=tuple(limits.workers),
            mean=both[:, 0],
            covariance=np.diag(both[:, 1] ** 2),
            cores=np.zeros(len(both)),
        )

    @property
    def seen(self) -> bool:
        """Whether the lock is observed at all."""
        return self.held is not None

    def observe(self, before: Snapshot, now: Snapshot) -> LockModel:
        """Returns the model after the time between two looks at the same layout."""
        seconds = now.at - before.at
        if now.lock_held_s is None or before.lock_held_s is None or seconds <= 0:
            return self
        held = min(1.0, max(0.0, now.lock_held_s - before.lock_held_s) / seconds)
        cores = np.zeros(len(self.mean))
        cores[-1] = 1.0
        for then, stage in zip(before.stages, now.stages, strict=True):
            if stage.name in self.names and stage.backend != "process":
                place = self.names.index(stage.name)
                cores[place] = max(0.0, stage.cpu_s - then.cpu_s) / seconds
        covariance = self.covariance + np.eye(len(self.mean)) * _DRIFT**2
        reach = covariance @ cores
        gain = reach / (cores @ reach + _NOISE**2 / min(1.0, seconds))
        mean = self.mean + gain * (held - cores @ self.mean)
        learned = replace(
            self, covariance=covariance - np.outer(gain, reach), cores=cores, held=held
        )
        return replace(learned, mean=learned._fit(mean[None])[0])

    def draw(self, random: np.random.Generator, count: int) -> tuple[dict[str, ndarray], ndarray]:
        """Returns draws of each stage's share, and of the trainer's."""
        if not self.seen:
            return dict.fromkeys(self.names, np.zeros(count)), np.zeros(count)
        values, vectors = np.linalg.eigh(self.covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        normal = random.standard_normal((count, 1, len(self.mean)))
        drawn = self._fit(self.mean + (normal * root).sum(2))  # faster than a product of matrices
        return {n: drawn[:, i] for i, n in enumerate(self.names)}, drawn[:, -1]

    def _fit(self, shares: ndarray) -> ndarray:
        """Returns possible shares: from 0 to 1, with no more of the lock held than was.

        A look tells nothing of a stage that uses no core in threads."""
        shares = np.clip(shares, 0.0, 1.0)
        most = (self.held or 0.0) + _SLACK
        fitting = np.minimum(1.0, most / np.maximum(shares @ self.cores, 1e-12))[:, None]
        return np.asarray(np.where(self.cores > 0, shares * fitting, shares))

    def share(self, name: str) -> float:
        """Returns the expected share of a stage's processor time under the lock."""
        return float(self.mean[self.names.index(name)]) if self.seen else 0.0

    def is_bystander(self, name: str) -> bool:
        """Whether a stage hardly holds the lock."""
        return self.share(name) < _HOLDER

    def waits(
        self, recent: PipelineRates, snapshot: Snapshot, settings: TunerSettings
    ) -> Mapping[str, float]:
        """Returns the share of each stage's working time in which it waited for the lock."""
        held = recent.lock
        if held is None or not self.seen:
            return {}
        threads = {
            name: stage
            for name, stage in recent.stages.items()
            if stage.busy > 1e-3 and snapshot.stage(name).backend != "process"
        }
        own = {name: max(0.0, s.busy - s.cpu - s.core_wait) for name, s in threads.items()}
        holders = [n for n, s in threads.items() if not self.is_bystander(n) and s.cpu > 0.02]
        crowd = sum(threads[n].busy for n in holders)
        full = held * (1 + settings.convoy * min(max(0.0, crowd - 1), _MOST_THREADS))
        certain = min(1.0, max(0.0, (full - _FREE) / (_FULL - _FREE)))
        waits = {}
        for name, stage in threads.items():
            if name in holders:
                waited = certain * own[name] * (1 - settings.free_wait_share)
            else:
                items = snapshot.stage(name).items / max(1, snapshot.stage(name).rows)
                waited = min(own[name], stage.rows_per_s * items * settings.turn_s * held)
            waits[name] = waited / stage.busy
        return waits


def lock_capacity(
    held_s: ndarray,
    holders: list[tuple[int, ndarray, ndarray]],
    trainer: ndarray,
    settings: TunerSettings,
) -> ndarray:
    """Returns draws of the rows a second that the lock allows.

    `held_s`: seconds a row under the lock, of all stages in threads. `holders`: the workers of each holder, its seconds
    a row without any wait for the lock, and those under it. The more threads want the lock, the more of it is
    wasted."""
    free = np.maximum(0.05, 1 - trainer)
    waste = np.zeros_like(held_s)
    rate = free / np.maximum(held_s, 1e-15)
    for _ in range(3):
        rate = free / np.maximum(held_s, 1e-15) / (1 + waste)
        if not holders:
            break
        stretch = np.min(
            [
                (n / rate - alone) / np.maximum(under, 1e-15) + 1e9 * (under < 0.02 * held_s)
                for n, alone, under in holders
            ],
            axis=0,
        )
        stretch = np.maximum(0.0, stretch)
        crowd = sum(np.minimum(n, rate * (alone + under * stretch)) for n, alone, under in holders)
        waste = settings.convoy * np.clip(crowd - 1, 0.0, _MOST_THREADS)
    return np.asarray(rate)
