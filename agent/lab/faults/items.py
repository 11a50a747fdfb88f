"""Simulates a pipeline item by item: `ItemSimulator`, a `Tunable` with its own clock.

The fluid simulator has no item under way between two looks. A real pipeline of slow items has: few or none end between
two looks, work under way is in `busy_s` but not in `finished_s`, and items that began before a fault keep their cost.

Stages, limits, starts of processes, memory and counters are those of every simulated pipeline. Cores and the lock slow
an item by what the items under way want when it begins.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

from sluice.agent.lab.simulator.base import CHUNK_S, SimulatedPipeline
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.ingest.stats import Snapshot

_SPREAD = 0.05  # of an item's seconds, if the stage has no tail
_EPSILON = 1e-6


class ItemSimulator(SimulatedPipeline):
    """The mode for slow items."""

    def __init__(self, scenario: Scenario, *, seed: int = 0) -> None:
        super().__init__(scenario, seed=seed)
        count = len(self.names)
        self._under_way = [0] * count
        self._held = [0] * count  # finished items that wait for space
        self._items = [0] * count
        self._finished_s = [0.0] * count
        self._events: list[tuple[float, int, int, float]] = []
        self._ticket = 0
        self._stepping = False
        self._factors = [1.0] * count
        self._burst = [1.0] * count

    def _changed(self) -> None:
        super()._changed()
        # Each item draws its own seconds, so no factor of a moment stands for a tail.
        self._uneven = [(i, replace(s, tail=0.0)) for i, s in self._uneven]

    def advance(self, seconds: float) -> None:
        """Lets this time pass, from event to event."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            chunk = min(CHUNK_S, end - self.now)
            self._factors = self._look(chunk)
            self._burst = self._bursts()
            until = self.now + chunk
            self._start()
            self._begin()
            while self._events and self._events[0][0] <= until:
                at, _, i, took = heapq.heappop(self._events)
                self._pass(at)
                if i < 0:
                    self._stepping = False
                else:
                    self._under_way[i] -= 1
                    self._held[i] += 1
                    self._finished_s[i] += took
                    self._add_item(i)
                self._begin()
            self._pass(until)

    def _add_item(self, i: int) -> None:
        """Counts a finished item."""
        stage = self.truth.stages[i]
        self._items[i] += 1
        self.done[i] += stage.rows_per_item
        self.bytes[i] += stage.rows_per_item * stage.bytes_per_row

    def _begin(self) -> None:
        """Begins all work that can begin."""
        stages = self.truth.stages
        moved = True
        while moved:
            moved = False
            for i in reversed(range(len(stages))):
                rows = stages[i].rows_per_item
                while self._held[i] and self.queue[i] + rows <= self.queue_limits[i] + _EPSILON:
                    self.queue[i] += rows
                    self._held[i] -= 1
                    moved = True
                while self._has_work(i):
                    if i:
                        self.queue[i - 1] -= rows
                    self._begin_item(i)
                    moved = True
            batch = self.truth.consumer.batch_rows
            if not self._stepping and self.queue[-1] >= batch - _EPSILON:
                self.queue[-1] -= batch
                self.consumed += batch
                self._stepping = moved = True
                self._push(self.truth.consumer.step_s, -1)

    def _has_work(self, i: int) -> bool:
        free = self._under_way[i] + self._held[i] < math.floor(self.ready[i] + _EPSILON)
        rows = self.truth.stages[i].rows_per_item
        return free and (i == 0 or self.queue[i - 1] >= rows - _EPSILON)

    def _begin_item(self, i: int) -> None:
        """Begins one item, whose seconds are drawn now."""
        stage, workers = self.truth.stages[i], max(1.0, self.ready[i])
        self._under_way[i] += 1
        wanted = sum(n * s.cpu for n, s in zip(self._under_way, self.truth.stages, strict=True))
        slow = max(1.0, wanted / self.truth.machine.cores)
        locked = sum(
            n * s.cpu * s.lock
            for n, s, b in zip(self._under_way, self.truth.stages, self.backends, strict=True)
            if b != "process"
        )
        process = self.backends[i] == "process"
        cost = (stage.cost_s + stage.process_cost_s * process) * self._factors[i]
        if stage.cliff_workers and workers > stage.cliff_workers:
            cost *= stage.cliff_factor
        cpu = cost * stage.cpu * (1 + stage.kappa * workers * (workers - 1))
        wait = cost * (1 - stage.cpu) * self._burst[i] + stage.sigma * (workers - 1) * cost
        took = cpu * slow + wait
        if not process and stage.lock:
            took += cpu * stage.lock * (max(1.0, locked) - 1)
        took *= self._luck(stage.tail)
        if stage.cap_rows_per_s:
            took = max(took, workers * stage.rows_per_item / stage.cap_rows_per_s)
        self.core_wait_s[i] += cpu * (slow - 1)
        self._push(took, i)

    def _luck(self, tail: float) -> float:
        """Returns a factor on an item's seconds, 1 in the mean."""
        if not tail:
            return max(0.3, 1 + _SPREAD * float(self._random.standard_normal()))
        spread = math.sqrt(math.log1p(tail * tail))
        return math.exp(spread * float(self._random.standard_normal()) - spread * spread / 2)

    def _push(self, took: float, i: int) -> None:
        self._ticket += 1
        heapq.heappush(self._events, (self.now + took, self._ticket, i, took))

    def _pass(self, to: float) -> None:
        """Adds the time until `to` to all counters."""
        seconds = to - self.now
        locked = 0.0
        for i, stage in enumerate(self.truth.stages):
            active = self._under_way[i]
            self.busy_s[i] += active * seconds
            self.cpu_s[i] += active * stage.cpu * seconds
            self.used_s += active * stage.cpu * seconds
            self.out_s[i] += self._held[i] * seconds
            self.in_s[i] += max(0.0, self.ready[i] - active - self._held[i]) * seconds
            if self.backends[i] != "process":
                locked += active * stage.cpu * stage.lock
        self.lock_s += min(1.0, locked) * seconds
        if self._stepping:
            self.compute_s += seconds
        else:
            self.wait_s += seconds
        self.active = [float(n) for n in self._under_way]
        self.memory = self._memory(seconds, self.active)
        self.now = to

    def snapshot(self) -> Snapshot:
        seen = super().snapshot()
        stages = tuple(
            replace(
                stage,
                items=self._items[i],
                finished_s=min(self._finished_s[i], stage.busy_s),
            )
            for i, stage in enumerate(seen.stages)
        )
        return replace(seen, stages=stages)
