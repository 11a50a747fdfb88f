"""Simulates remote workers: hosts start slowly.

`SimulatedFleet` is the fleet, `FleetPipeline` a simulated pipeline that reads by it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np

from sluice.agent.lab.simulator.base import CHUNK_S
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.ingest.knobs import REMOTE, REQUESTS_A_CORE, Knobs, Limits
from sluice.ingest.stats import Snapshot

_QUEUEING = 8  # the power of the share of workers at work by which requests wait for each other


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTruth:
    """How the hosts truly are."""

    start_s: float = 30.0
    """Mean seconds until a new worker answers; each takes from .7 to 1.3 times that."""


@dataclass(slots=True)
class SimulatedWorker:
    """A worker of one core."""

    called_at: float
    ready_at: float


@dataclass(slots=True)
class SimulatedFleet:
    """The workers that there are."""

    truth: FleetTruth
    random: np.random.Generator
    now: float = 0.0
    wanted: int = 0
    workers: list[SimulatedWorker] = field(default_factory=list)
    core_s: float = 0.0
    start_s: float = 0.0
    """How long the workers that came last took, weighed as the loader's fleet weighs it."""

    def use(self, wanted: int) -> None:
        """Places workers, or takes some away: those that have not started first, of the others any."""
        self.wanted = wanted
        leaving = max(0, len(self.workers) - wanted)
        if leaving:
            order = self.random.permutation(len(self.workers)).tolist()
            order.sort(key=lambda n: self.workers[n].ready_at <= self.now)
            gone = set(order[:leaving])
            self.workers = [worker for n, worker in enumerate(self.workers) if n not in gone]
        self._place()

    def pass_time(self, seconds: float) -> None:
        self.core_s += len(self.workers) * seconds
        before, self.now = self.now, self.now + seconds
        for worker in self.workers:
            if before < worker.ready_at <= self.now:
                took = worker.ready_at - worker.called_at
                self.start_s = (
                    took if not self.start_s else self.start_s + 0.25 * (took - self.start_s)
                )

    def _place(self) -> None:
        while len(self.workers) < self.wanted:
            ready_at = self.now + self.truth.start_s * self.random.uniform(0.7, 1.3)
            self.workers.append(SimulatedWorker(self.now, ready_at))

    @property
    def ready(self) -> int:
        return sum(worker.ready_at <= self.now for worker in self.workers)


class _Simulator(Simulator):
    """A simulator in which another host decides the number of a stage's workers."""

    def set_workers(self, i: int, workers: float) -> None:
        """Sets a stage's ready workers, if another host decides their number."""
        if self.ready[i] != workers:
            self.ready[i] = workers
            self._changed()


class FleetPipeline:
    """A `Tunable` of its own clock whose first stage asks a fleet, two requests for each worker."""

    def __init__(self, scenario: Scenario, truth: FleetTruth, *, seed: int = 0) -> None:
        self.sim = _Simulator(scenario.truth_at, scenario.limits, scenario.first_knobs, seed=seed)
        self.fleet = SimulatedFleet(truth, np.random.default_rng((3, seed)))
        self._name = scenario.stages[0].name
        self._busy_s = self._in_s = self._out_s = 0.0
        self.apply(scenario.first_knobs)
        for worker in self.fleet.workers:  # the run begins once those that it begins with are there
            worker.ready_at = worker.called_at
        self._man()

    @property
    def limits(self) -> Limits:
        return self.sim.limits

    @property
    def knobs(self) -> Knobs:
        return self.sim.knobs

    @property
    def now(self) -> float:
        return self.sim.now

    def apply(self, knobs: Knobs) -> None:
        self.sim.apply(knobs)
        self.fleet.use(
            math.ceil(self._requests / REQUESTS_A_CORE)
            if knobs.backend.get(self._name) == REMOTE
            else 0
        )
        self._man()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            step_s = min(CHUNK_S, end - self.now)
            before, speed = (
                (self.sim.busy_s[0], self.sim.in_s[0], self.sim.out_s[0]),
                self.fleet.ready,
            )
            self.sim.advance(step_s)
            self._count(
                step_s,
                speed,
                *(
                    now - then
                    for now, then in zip(
                        (self.sim.busy_s[0], self.sim.in_s[0], self.sim.out_s[0]),
                        before,
                        strict=True,
                    )
                ),
            )
            self.fleet.pass_time(step_s)
            self._man()

    def snapshot(self) -> Snapshot:
        seen, fleet = self.sim.snapshot(), self.fleet
        first = dataclasses.replace(
            seen.stages[0], busy_s=self._busy_s, wait_input_s=self._in_s, wait_output_s=self._out_s
        )
        return dataclasses.replace(
            seen,
            stages=(first, *seen.stages[1:]),
            elsewhere={
                "workers": fleet.ready,
                "starting": fleet.wanted - fleet.ready,
                "core_s": fleet.core_s,
                "requests_a_core": REQUESTS_A_CORE,
                "start_s": fleet.start_s,
            },
        )

    @property
    def _requests(self) -> int:
        return self.knobs.workers[self._name]

    def _man(self) -> None:
        self.sim.set_workers(0, self.fleet.ready)

    def _count(self, step_s: float, speed: float, busy_s: float, in_s: float, out_s: float) -> None:
        """Counts what the threads that ask do. While workers have room, a request takes as long as the work; where all
        are at work, requests wait for each other, and where nobody is there, for a worker."""
        share = min(1.0, busy_s / (speed * step_s)) if speed else 1.0
        at_work = min(self._requests, share * self.fleet.ready)
        asking = (at_work + (self._requests - at_work) * share**_QUEUEING) * step_s
        self._busy_s += asking
        idle_s = self._requests * step_s - asking
        waits = in_s + out_s
        self._in_s += idle_s * (in_s / waits if waits > 0 else 0.0)
        self._out_s += idle_s * (out_s / waits if waits > 0 else 1.0)
