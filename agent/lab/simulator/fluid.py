"""Simulates a pipeline: `Simulator`, a `Tunable` with its own clock, for training and judging policies.

`advance(seconds)` lets time pass. Between two events, rows flow as a fluid with the rates of
`sluice.agent.lab.simulator.physics.flow`. An event is a queue that becomes empty or full, a worker that is ready, or a
burst that begins. The same seed always gives the same run.
"""

from __future__ import annotations

import math
from typing import Any

from sluice.agent.lab.simulator.base import CHUNK_S, SimulatedPipeline
from sluice.agent.lab.simulator.flow import Flow, flow
from sluice.agent.lab.simulator.physics import Load

_MANY_EVENTS = 12
"""After this many events in a chunk, queues alternate at their limits. The rest of the chunk has constant rates."""
_SHORTEST_S = 1e-3
"""The least time between two events."""


class Simulator(SimulatedPipeline):
    """The fluid mode. `advance` is fast enough for thousands of decisions a second."""

    _guess = (1.0, 1.0, 1.0, 1.0)
    _load: tuple[Any, Load] | None = None
    _flow: tuple[Any, Flow] | None = None

    def advance(self, seconds: float) -> None:
        """Lets this time pass."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            chunk = min(CHUNK_S, end - self.now)
            factors = self._look(chunk)
            if self.killed:
                self.now += chunk
                self.wait_s += chunk
                continue
            self._chunk(self.now + chunk, factors)

    def _chunk(self, end: float, factors: list[float]) -> None:
        """Lets the time until `end` pass, from event to event."""
        count = len(self.names)
        noise = (
            1 + self.truth.machine.timer_noise * self._random.standard_normal(2 * count)
        ).tolist()
        bursts = self._bursts()
        uncapped = self._uncapped()
        events = 0
        while self.now < end - 1e-9:
            events += 1
            overhead = self._start()
            admitted, queue_share = self.governed()
            # A store that has spent its credit gives none before the next chunk. Otherwise it could alternate.
            uncapped = [i for i in self._uncapped() if i in uncapped]
            load = self._loaded(admitted, factors, bursts, uncapped)
            limits = (
                self.queue_limits
                if queue_share == 1
                else [max(1.0, rows * queue_share) for rows in self.queue_limits]
            )
            empty = [q <= 1e-6 * m for q, m in zip(self.queue, limits, strict=True)]
            full = [q >= m * (1 - 1e-6) for q, m in zip(self.queue, limits, strict=True)]
            current = self._flowing(load, empty, full, overhead)
            ready = [at for at, *_ in (*self._moving.values(), *self._starting)]
            to_start = min(ready, default=end) - self.now
            seconds = min(max(to_start, _SHORTEST_S), end - self.now)
            to_queue = self._seconds_to_queue(current, limits)
            if events <= _MANY_EVENTS:
                seconds = min(seconds, max(to_queue, _SHORTEST_S))
            if to_queue < seconds:
                current = self._flowing_on(load, empty, full, overhead, limits, seconds)
            credit_s = self._seconds_of_credit(current, uncapped)
            seconds = min(seconds, max(credit_s, _SHORTEST_S))
            self._account(current, load, seconds, limits, noise, admitted)
            if self.memory > self.truth.machine.memory_limit:
                self.killed = True
                self.now = end
                return

    def _changed(self) -> None:
        super()._changed()
        self._load = None

    def _loaded(
        self,
        admitted: list[float],
        factors: list[float],
        bursts: list[float],
        uncapped: list[int],
    ) -> Load:
        """Returns the load. The last one is used again if nothing has changed."""
        key = (tuple(admitted), factors, bursts, uncapped)
        if self._load is None or self._load[0] != key:
            workers = [max(n, 1e-6) for n in admitted]
            load = Load.of(
                self.truth,
                workers,
                self.backends,
                factors=factors,
                bursts=bursts,
                uncapped=uncapped,
            )
            self._load = (key, load)
        return self._load[1]

    def _flowing(self, load: Load, empty: list[bool], full: list[bool], overhead: float) -> Flow:
        """Returns the flow. The last one is used again if nothing has changed."""
        key = (load, empty, full, overhead, self._guess)
        if self._flow is None or self._flow[0] != key:
            self._flow = (key, flow(load, empty, full, overhead, self._guess))
            self._guess = self._flow[1].factors
        return self._flow[1]

    def _flowing_on(  # noqa: PLR0917
        self,
        load: Load,
        empty: list[bool],
        full: list[bool],
        overhead: float,
        limits: list[float],
        seconds: float,
    ) -> Flow:
        """Returns a flow for all of these `seconds`, in which no queue passes its limit, or gives rows that it lacks.

        A queue that would do so is taken as full, or as empty, from the beginning."""
        while True:
            current = self._flowing(load, empty, full, overhead)
            after = [
                waiting + (current.rates[i] - current.rates[i + 1]) * seconds
                for i, waiting in enumerate(self.queue)
            ]
            now_empty = [e or rows < 0 for e, rows in zip(empty, after, strict=True)]
            now_full = [f or a > most for f, a, most in zip(full, after, limits, strict=True)]
            if now_empty == empty and now_full == full:
                return current
            empty = now_empty
            full = now_full

    def _seconds_of_credit(self, current: Flow, uncapped: list[int]) -> float:
        """Returns the seconds until the credit of one of these stores is spent."""
        seconds = math.inf
        for i in uncapped:
            spending = current.rates[i] - self.truth.stages[i].cap_rows_per_s
            if spending > 0:
                seconds = min(seconds, self._bucket[i] / spending)
        return seconds

    def _seconds_to_queue(self, current: Flow, limits: list[float]) -> float:
        """Returns the seconds until a queue becomes full or empty."""
        seconds = math.inf
        for i, waiting in enumerate(self.queue):
            gain = current.rates[i] - current.rates[i + 1]
            if gain > 1e-9 * current.rates[i] and waiting < limits[i]:
                seconds = min(seconds, (limits[i] - waiting) / gain)
            elif gain < -1e-9 * current.rates[i] and waiting > 0:
                seconds = min(seconds, -waiting / gain)
        return seconds

    def _account(  # noqa: PLR0917
        self,
        current: Flow,
        load: Load,
        seconds: float,
        limits: list[float],
        noise: list[float],
        admitted: list[float],
    ) -> None:
        """Adds the rows and the seconds of the workers during these `seconds` to all counters."""
        rates = current.rates
        shares = current.busy
        in_flight = []
        for i, stage in enumerate(self.truth.stages):
            rows, after = rates[i] * seconds, rates[i + 1]
            self.done[i] += rows
            self.bytes[i] += rows * self._row_bytes[i]
            queue = self.queue[i] = max(0.0, self.queue[i] + rows - after * seconds)
            active = admitted[i] * shares[i]
            useful = active * seconds
            if stage.sigma:
                # The rates assume that all workers disturb each other, but idle workers do not.
                calm = stage.sigma * max(0.0, admitted[i] - max(1.0, active)) * stage.cost_s
                useful -= min(rows / stage.rows_per_item * calm, 0.5 * active * seconds)
            used = min(rows / stage.rows_per_item * current.cpu_per_item[i], useful)
            waited = min(used * (current.factors[0] - 1), useful - used)
            useful *= max(0.5, noise[2 * i])
            timer_error = max(0.5, noise[2 * i + 1])
            self.busy_s[i] += useful
            self.cpu_s[i] += used * timer_error
            self.core_wait_s[i] += waited * timer_error
            idle = (self.ready[i] - active) * seconds
            blocked = queue >= 0.999 * limits[i]
            starved = i > 0 and self.queue[i - 1] <= 1e-3 * limits[i - 1]
            if blocked and not (starved and rates[i - 1] <= after):
                self.out_s[i] += idle
            else:
                self.in_s[i] += idle
            if admitted[i] < self.ready[i]:
                self.held_back += (self.ready[i] - admitted[i]) * seconds
            in_flight.append(active)
        for i, stage in self._throttled:
            left = self._bucket[i] + (stage.cap_rows_per_s - rates[i]) * seconds
            self._bucket[i] = min(stage.credit_rows, max(0.0, left))
        self.consumed += current.rates[-1] * seconds
        self.compute_s += current.busy[-1] * seconds
        self.wait_s += (1 - current.busy[-1]) * seconds
        self.used_s += current.used_cores * seconds
        self.lock_s += current.lock * seconds
        self.now += seconds
        self.active = in_flight
        self.memory = self._memory(seconds, in_flight)
