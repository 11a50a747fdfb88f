"""The state of a simulated pipeline: `SimulatedPipeline`.

`sluice.agent.lab.simulator.fluid` derives from it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from operator import mul

import numpy as np

from sluice.agent.lab.simulator.physics import TrueCosts
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.ingest.knobs import KnobError, Knobs, Limits
from sluice.ingest.stats import Snapshot, StageStats

CHUNK_S = 0.25  # Noise, drift and changes of the true costs are updated this often.
GOVERNOR_FILLS = 0.97  # The governor admits work up to this share of the memory limit.


class SimulatedPipeline:
    """The pipeline of a scenario: its time, true costs, workers, queues and counters.

    The same seed always gives the same run. A subclass moves the rows."""

    def __init__(self, scenario: Scenario, *, seed: int = 0, governor: bool = True) -> None:
        self._truth_at = scenario.truth_at
        self._limits = scenario.limits
        self.truth = scenario.truth_at(0.0)
        self._knobs = self._limits.clamp(scenario.first_knobs)
        self.governor = governor
        self._random = np.random.default_rng(seed)
        self.now = 0.0
        self.killed = False
        self.held_back = 0.0
        names = self.names = [s.name for s in self.truth.stages]
        count = len(names)
        self.ready = [float(self._knobs.workers[n]) for n in names]
        self._starting: list[tuple[float, int, float]] = []
        """(time at which they are ready, stage, number of workers)."""
        self._moving: dict[int, tuple[float, float]] = {}
        """Stage that moves to processes → when they are ready, and their number. Until then its threads work."""
        self.backends = [self._knobs.backend.get(n, self._limits.backends_of(n)[0]) for n in names]
        self._process_bytes = [0] * count
        """The memory of each stage's process. 0 until one was measured."""
        self.queue = [0.0] * count
        self.done = [0.0] * count
        self.bytes = [0.0] * count
        self.busy_s = [0.0] * count
        self.cpu_s = [0.0] * count
        self.core_wait_s = [0.0] * count
        self.in_s = [0.0] * count
        self.out_s = [0.0] * count
        self.consumed = self.wait_s = self.compute_s = self.used_s = self.lock_s = 0.0
        self._walk = [0.0] * count
        self._burst_until = [-1.0] * count
        self._burst_next = [math.inf] * count
        for i, stage in enumerate(self.truth.stages):
            if stage.burst_every_s:
                self._burst_next[i] = self._random.exponential(stage.burst_every_s)
        self._bucket = [s.credit_rows for s in self.truth.stages]
        self._item_bytes = [s.held_bytes for s in self.truth.stages]
        self._row_bytes = [s.bytes_per_row for s in self.truth.stages]
        self.active = [0.0] * count
        self._changed()
        self.memory = self._memory(0.0, self.active)
        self._sequence = 0
        self._drifted: tuple[TrueCosts, tuple[int, ...], TrueCosts] | None = None

    # The methods of a Tunable follow.

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def knobs(self) -> Knobs:
        return self._knobs

    def apply(self, knobs: Knobs) -> None:
        self._limits.check(knobs)
        if missing := [n for n in self.names if n not in knobs.workers]:
            raise KnobError(f"no number of workers for {missing[0]!r}")
        for i, name in enumerate(self.names):
            stage, count = self.truth.stages[i], knobs.workers[name]
            backend = knobs.backend.get(name, self._limits.backends_of(name)[0])
            delay = stage.process_start_s if backend == "process" else stage.start_s
            coming = sum(n for _, s, n in self._starting if s == i)
            if backend != self.backends[i]:
                self._starting = [entry for entry in self._starting if entry[1] != i]
                coming = 0.0
                if backend == "process" and delay > 0:
                    at, moving = self._moving.get(i, (self.now + delay, count))
                    self._moving[i] = (at, min(moving, count))
                    if count > moving:
                        self._starting.append((self.now + delay, i, count - moving))
                    self.ready[i] = min(self.ready[i], float(count))
                    continue
                self.ready[i] = 0.0
                self.backends[i] = backend
            self._moving.pop(i, None)
            more = count - self.ready[i] - coming
            if more < 0:  # Workers that have not started yet are removed first.
                self._starting = [entry for entry in self._starting if entry[1] != i]
                self.ready[i] = min(self.ready[i], float(count))
                more = count - self.ready[i]
            if more > 0 and delay > 0:
                self._starting.append((self.now + delay, i, more))
            else:
                self.ready[i] += max(0.0, more)
        self._knobs = knobs
        self._changed()

    def snapshot(self) -> Snapshot:
        limits = self.queue_limits
        for i, stage in enumerate(self.truth.stages):
            if self.backends[i] == "process" and self.ready[i] and self.active[i]:
                self._process_bytes[i] = max(
                    self._process_bytes[i], math.ceil(stage.process_bytes), 1
                )
        stages = tuple(
            StageStats(
                name=name,
                items=int(self.done[i] / self.truth.stages[i].rows_per_item),
                rows=int(self.done[i]),
                bytes=int(self.bytes[i]),
                busy_s=self.busy_s[i],
                finished_s=self.busy_s[i],
                cpu_s=self.cpu_s[i],
                core_wait_s=self.core_wait_s[i],
                wait_input_s=self.in_s[i],
                wait_output_s=self.out_s[i],
                workers=self._knobs.workers[name],
                backend="process" if i in self._moving else self.backends[i],
                starting=self._processes_starting(i),
                queue_bytes=int(self.queue[i] * self._row_bytes[i]),
                queue_limit_bytes=int(limits[i] * self._row_bytes[i]),
                process_bytes=self._process_bytes[i],
            )
            for i, name in enumerate(self.names)
        )
        machine = self.truth.machine
        snapshot = Snapshot(
            at=self.now,
            sequence=self._sequence,
            stages=stages,
            batches=int(self.consumed / self.truth.consumer.batch_rows),
            rows=int(self.consumed),
            consumer_wait_s=self.wait_s,
            consumer_compute_s=self.compute_s,
            memory_used=int(self.memory),
            memory_limit=int(machine.memory_limit),
            cpu_quota=machine.cores,
            cpu_used_s=self.used_s,
            lock_held_s=self.lock_s,
            held_back=int(self.held_back),
        )
        self._sequence += 1
        return snapshot

    def true_at(self, seconds: float) -> TrueCosts:
        """Returns the true costs at a moment, with the drift so far in steps of a tenth. Oracles use it."""
        truth = self._truth_at(seconds)
        steps = tuple(
            round(w * 10) if s.drift else 0 for w, s in zip(self._walk, truth.stages, strict=True)
        )
        if not any(steps):
            return truth
        if self._drifted is None or self._drifted[0] is not truth or self._drifted[1] != steps:
            stages = tuple(
                replace(s, cost_s=s.cost_s * math.exp(n / 10))
                for s, n in zip(truth.stages, steps, strict=True)
            )
            self._drifted = (truth, steps, replace(truth, stages=stages))
        return self._drifted[2]

    # The methods for subclasses follow.

    def _changed(self) -> None:
        """Recomputes what depends on true costs, knobs, workers and row sizes. These change rarely."""
        stages = self.truth.stages
        machine = self.truth.machine
        last = len(self.names) - 1
        self._turning = any(
            a != s.held_bytes or b != s.bytes_per_row
            for a, b, s in zip(self._item_bytes, self._row_bytes, stages, strict=True)
        )
        self._throttled = [(i, s) for i, s in enumerate(stages) if s.credit_rows]
        self._uneven = [(i, s) for i, s in enumerate(stages) if s.drift or s.tail]
        self._worker_bytes = [
            stage.process_bytes * (backend == "process")
            for stage, backend in zip(stages, self.backends, strict=True)
        ]
        self.queue_limits: list[float] = []
        """The most rows that may wait after each stage. A queue takes at least one item of either neighbour."""
        for i, stage in enumerate(stages):
            after = (
                stages[i + 1].rows_per_item if i < last else float(self.truth.consumer.batch_rows)
            )
            width = max(1e-9, self._row_bytes[i])
            if stage.buffer_limit == "read_ahead_bytes":
                rows = self._knobs.read_ahead_bytes / width
            elif stage.buffer_limit == "prefetch_bytes":
                rows = self._knobs.prefetch_bytes / width
            else:
                rows = stage.buffer_items * stage.rows_per_item
            self.queue_limits.append(max(rows, stage.rows_per_item, after))
        self._sizes = [max(a, s.held_bytes) for a, s in zip(self._item_bytes, stages, strict=True)]
        self._in_hand = sum(map(mul, self.ready, self._sizes))
        self._waiting = sum(
            q * s.bytes_per_row for q, s in zip(self.queue_limits, stages, strict=True)
        )
        self._free_bytes = GOVERNOR_FILLS * machine.memory_limit - (
            machine.base_bytes + sum(map(mul, self.ready, self._worker_bytes))
        )

    def _memory(self, seconds: float, in_flight: list[float]) -> float:
        """Returns the bytes in use now. Freed memory is returned slowly."""
        target = self.truth.machine.base_bytes
        for n, size, rows, width, ready, own in zip(
            in_flight,
            self._item_bytes,
            self.queue,
            self._row_bytes,
            self.ready,
            self._worker_bytes,
            strict=True,
        ):
            target += n * size + rows * width + ready * own
        last = getattr(self, "memory", target)
        lag = self.truth.machine.memory_lag_s
        if target >= last or lag <= 0:
            return target
        return target + (last - target) * math.exp(-seconds / lag)

    def governed(self) -> tuple[list[float], float]:
        """Returns the workers that the governor admits, and the share of the queues' limits that it allows."""
        workers = self.ready
        if not self.governor:
            return workers, 1.0
        queued = sum(map(mul, self.queue, self._row_bytes))
        if self._in_hand + max(queued, self._waiting) <= self._free_bytes:
            return workers, 1.0
        # A worker without input needs no memory for an item.
        asking = [min(n, a + 1) for n, a in zip(workers, self.active, strict=True)]
        share = min(
            1.0, max(0.0, self._free_bytes - queued) / max(1.0, sum(map(mul, asking, self._sizes)))
        )
        admitted = [max(min(1.0, n), n * share) for n in asking]
        held = sum(map(mul, admitted, self._sizes))
        return admitted, min(1.0, max(0.0, self._free_bytes - held) / max(1.0, self._waiting))

    def _look(self, seconds: float) -> list[float]:
        """Applies changes, drift, tails and bursts of the last `seconds`. Returns each stage's factor on its cost."""
        truth = self._truth_at(self.now)
        if truth is not self.truth:
            self.truth = truth
            self._changed()
        factors = [1.0] * len(self.names)
        normal = self._random.standard_normal(2 * len(self.names))
        for i, stage in self._uneven:
            if stage.drift:
                self._walk[i] += stage.drift * math.sqrt(seconds) * float(normal[2 * i])
                factors[i] = math.exp(self._walk[i])
            if stage.tail:
                finished = max(1.0, self.ready[i] * seconds / stage.cost_s)
                spread = math.sqrt(math.log1p(stage.tail * stage.tail / finished))
                factors[i] *= math.exp(spread * float(normal[2 * i + 1]) - spread * spread / 2)
        for i, stage in enumerate(self.truth.stages):
            if self.now >= self._burst_next[i]:
                self._burst_until[i] = self.now + self._random.exponential(stage.burst_s)
                self._burst_next[i] = self._burst_until[i] + self._random.exponential(
                    stage.burst_every_s
                )
        if self._turning:
            # Workers and queues still hold rows of the old size. They are replaced as fast as the stages work.
            for i, stage in enumerate(self.truth.stages):
                replaced = -math.expm1(-seconds / max(stage.cost_s, 0.5))
                self._item_bytes[i] += (stage.held_bytes - self._item_bytes[i]) * replaced
                self._row_bytes[i] += (stage.bytes_per_row - self._row_bytes[i]) * replaced
            self._changed()
        return factors

    def _bursts(self) -> list[float]:
        return [
            s.burst_factor if self.now < self._burst_until[i] else 1.0
            for i, s in enumerate(self.truth.stages)
        ]

    def _uncapped(self) -> list[int]:
        """Returns the stages whose store still gives credit."""
        return [i for i, stage in self._throttled if self._bucket[i] > 1e-6 * stage.credit_rows]

    def _start(self) -> float:
        """Adds the workers that are ready. Returns the cores that starting workers use."""
        if not self._starting and not self._moving:
            return 0.0
        now = self.now + 1e-9
        # The first process of a stage starts, so its memory is not free for the others. A real pipeline lets the first
        # one of a stage wait too where memory is short.
        first = sum(self.truth.stages[i].process_bytes for i in self._moving)
        free = self.truth.machine.memory_limit - self.memory - first
        moved = [i for i, (at, _) in self._moving.items() if at <= now]
        for i in moved:
            free -= self._move(i, free)
        joined = [entry for entry in self._starting if entry[0] <= now]
        for entry in joined:
            _, i, more = entry
            if self.backends[i] == "process":
                more = min(more, self._fitting(i, free))
                free -= more * self.truth.stages[i].process_bytes
            self.ready[i] += more
            self._starting.remove(entry)
        if joined or moved:
            self._changed()
        # A process imports its libraries while it starts, and that uses one core.
        return min(
            sum(map(self._processes_starting, range(len(self.names)))),
            self.truth.machine.cores * 0.5,
        )

    def _move(self, i: int, free: float) -> float:
        """Moves a stage to its processes, and returns the memory that all but the first take of what is free.

        Memory may be too small for all processes that start. If none of this stage was measured either, only its first
        process has started now. The others start after it."""
        stage = self.truth.stages[i]
        if free < (1 - GOVERNOR_FILLS) * self.truth.machine.memory_limit:
            # The first process is ended while it starts, and the stage stays in its threads.
            self._process_bytes[i] = math.ceil(stage.process_bytes)
            del self._moving[i]
            return -stage.process_bytes
        unmeasured = sum(n for j, (_, n) in self._moving.items() if not self._process_bytes[j])
        count = self._moving.pop(i)[1]
        doubtful = free < (unmeasured + 1) * self.truth.machine.base_bytes
        if count > 1 and doubtful and not self._process_bytes[i]:
            self._process_bytes[i] = max(1, math.ceil(stage.process_bytes))
            self._moving[i] = (self.now + stage.process_start_s, count)
            return 0.0
        more = min(count - 1, self._fitting(i, free))
        self.backends[i] = "process"
        self.ready[i] = 1 + more
        return more * stage.process_bytes

    def _fitting(self, i: int, free: float) -> float:
        """Returns how many more processes of a stage start, as the last one must leave memory for another."""
        return max(0.0, free // max(1.0, self.truth.stages[i].process_bytes) - 1)

    def _processes_starting(self, i: int) -> int:
        """Returns the processes of a stage that have not started yet."""
        if self.backends[i] != "process" and i not in self._moving:
            return 0
        more = sum(n for _, stage, n in self._starting if stage == i)
        return math.ceil(more + self._moving.get(i, (0.0, 0.0))[1])
