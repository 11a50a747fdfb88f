"""The simulator item by item: every item is taken, worked on and passed on in order. It is slower than
`sluice.agent.lab.simulator.fluid` and has fewer approximations: the tests check the fluid mode against it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sluice.agent.lab.simulator.base import CHUNK_S, SimulatedPipeline
from sluice.agent.lab.simulator.physics import UNBOUNDED, Flow, Load, TrueCosts, flow
from sluice.ingest.knobs import Knobs, Limits


@dataclass(slots=True)
class _Item:
    left: float
    """The share of the item's work still to do, in units of a mean item."""
    done: bool = False


class EventSimulator(SimulatedPipeline):
    """The same Tunable as `Simulator`, simulated item by item."""

    def __init__(
        self,
        truth_at: Callable[[float], TrueCosts],
        limits: Limits,
        knobs: Knobs,
        *,
        seed: int = 0,
        governor: bool = True,
    ) -> None:
        super().__init__(truth_at, limits, knobs, seed=seed, governor=governor)
        self._items: list[list[_Item]] = [
            [] for _ in self.names
        ]  # begun and not passed on, in order
        self._step_left = 0.0
        self._guess = (1.0, 1.0, 1.0, 1.0)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            chunk = min(CHUNK_S, end - self.now)
            self._look(chunk)
            if self.killed:
                self.now += chunk
                self.wait_s += chunk
            else:
                self._run(self.now + chunk)

    def _active(self, i: int) -> int:
        return sum(not item.done for item in self._items[i])

    def _run(self, end: float) -> None:
        drift = [
            math.exp(w) if s.drift else 1.0
            for w, s in zip(self._walk, self.truth.stages, strict=True)
        ]
        noise = (
            1 + self.truth.machine.timer_noise * self._random.standard_normal(2 * len(self.names))
        ).tolist()
        while self.now < end - 1e-9:
            overhead = self._start()
            self._begin()
            active = [self._active(i) for i in range(len(self.names))]
            load = Load(
                self.truth,
                [max(1e-9, float(n)) for n in active],
                self.backends,
                drift,
                self._bursts(),
                self._heads,
            )
            for i in self._uncapped():
                load.cap[i] = UNBOUNDED
            if self._step_left <= 0:
                load.consumer_cpu = 0.0
            free = [False] * len(active)
            current = flow(load, free, free, overhead, self._guess)
            self._guess = current.factors
            pace = [
                current.rates[i] / (n * load.rows[i]) if n else 0.0 for i, n in enumerate(active)
            ]
            step_pace = current.rates[-1] / load.batch
            seconds = end - self.now
            for at in self._start_times():
                seconds = min(seconds, max(1e-9, at - self.now))
            for i, items in enumerate(self._items):
                for item in items:
                    if not item.done:
                        seconds = min(seconds, item.left / pace[i])
            if self._step_left > 0:
                seconds = min(seconds, self._step_left / step_pace)
            self._pass_time(max(seconds, 1e-9), active, pace, step_pace, current, load, noise)
            if self.memory > self.truth.machine.memory_limit:
                self.killed = True
                self.now = end
                return

    def _begin(self) -> None:
        """Passes finished items on in order, and gives work to every worker that may have some."""
        admitted, room = self.governed()
        limits = self.queue_limits
        stages = self.truth.stages
        for i, items in enumerate(self._items):
            while items and items[0].done:
                items.pop(0)
                self.queue[i] += stages[i].rows_per_item
        batch = self.truth.consumer.batch_rows
        while self._step_left <= 0 and self.queue[-1] >= batch:
            self.queue[-1] -= batch
            self.consumed += batch
            if self.truth.consumer.step_s:
                self._step_left = 1.0
        for i in reversed(range(len(stages))):
            rows, items = stages[i].rows_per_item, self._items[i]
            while (
                self._active(i) < max(1, round(admitted[i]))
                and self.ready[i] >= 1
                and self.queue[i] + len(items) * rows
                < max(rows, limits[i] * room) + self.ready[i] * rows - rows / 2
                and (self.queue[i] < limits[i] * room or not items)
                and (i == 0 or self.queue[i - 1] >= rows)
            ):
                if i:
                    self.queue[i - 1] -= rows
                items.append(_Item(self._size(stages[i].tail)))

    def _size(self, tail: float) -> float:
        if not tail:
            return 1.0
        spread = math.sqrt(math.log1p(tail * tail))
        return math.exp(spread * float(self._random.standard_normal()) - spread * spread / 2)

    def _pass_time(  # noqa: PLR0917
        self,
        seconds: float,
        active: list[int],
        pace: list[float],
        step_pace: float,
        current: Flow,
        load: Load,
        noise: list[float],
    ) -> None:
        self._spend_credit(
            [
                p * n * s.rows_per_item
                for p, n, s in zip(pace, active, self.truth.stages, strict=True)
            ],
            seconds,
        )
        for i, items in enumerate(self._items):
            for item in items:
                if not item.done:
                    item.left -= pace[i] * seconds
                    item.done = item.left <= 1e-9
                    if item.done:
                        self._pass_on(i, self.truth.stages[i].rows_per_item)
            used = min(pace[i] * active[i] * current.cpu_per_item[i], active[i]) * seconds
            waited = min(used * (current.factors[0] - 1), active[i] * seconds - used)
            blurred = max(0.5, noise[2 * i + 1])
            self._credit(
                load.shares[i],
                active[i] * seconds * max(0.5, noise[2 * i]),
                used * blurred,
                waited * blurred,
            )
            idle = max(0.0, self.ready[i] - active[i]) * seconds * (self._heads[i] == i)
            if i and self.queue[i - 1] < self.truth.stages[i].rows_per_item:
                self.in_s[i] += idle
            else:
                self.out_s[i] += idle
        if self._step_left > 0:
            self.compute_s += seconds
            self._step_left -= step_pace * seconds
            if self._step_left <= 1e-9:
                self._step_left = 0.0
        else:
            self.wait_s += seconds
        self.used_s += current.used_cores * seconds
        self.now += seconds
        self.active = [float(n) for n in active]
        self.memory = self._memory(seconds, self.active)
        self.peak = max(self.peak, self.memory)
