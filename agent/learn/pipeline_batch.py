"""Simulates many pipelines at once, for thousands of episodes a minute: `PipelineBatch`.

It follows `sluice.agent.simulator.physics` and takes the same scenarios. Knobs are set as arrays, and time passes in
steps of a quarter of a second for all pipelines together. In a step, a stage passes on at most what its workers can
do, what has arrived, and what the next queue can take. A starting worker counts from the nearest quarter on, and the
governor decides once a quarter. Otherwise rows and busy times equal those of `sluice.agent.simulator.fluid` within
two per cent. Stages are never fused. Arrays are stage × pipeline. A pipeline's last stage is in the last row; rows
before its first stage are empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from sluice.agent.learn.batch_flow import BatchFlow, BatchTruth
from sluice.agent.simulator.base import CHUNK_S, GOVERNOR_FILLS
from sluice.agent.simulator.scenario import Scenario
from sluice.ingest.knobs import Knobs
from sluice.ingest.stats import Snapshot, StageStats


@dataclass(frozen=True, slots=True)
class BatchKnobs:
    """The knobs of all pipelines."""

    workers: ndarray
    process: ndarray
    """Whether a stage runs in processes."""
    read_ahead_bytes: ndarray
    prefetch_bytes: ndarray


class PipelineBatch:
    """The pipelines of some scenarios. Their counters are those of a `Snapshot`, as arrays. One seed always gives the
    same course."""

    def __init__(
        self, scenarios: Sequence[Scenario], *, seed: int = 0, governor: bool = True, alike: int = 1
    ) -> None:
        """Each group of `alike` neighbouring scenarios has the same random events, whatever their knobs. So a group
        compares settings."""
        fused = [s.name for s in scenarios if s.first_knobs.fused]
        if fused or not scenarios:
            raise ValueError(
                f"{', '.join(fused) or 'no scenario'}: a batch needs pipelines without fused stages"
            )
        if len(scenarios) % alike:
            raise ValueError(f"alike: {len(scenarios)} scenarios are not groups of {alike}")
        self.scenarios = tuple(scenarios)
        self._governor = governor
        self._alike = alike
        self._random = np.random.default_rng(seed)
        rows, count = max(len(s.stages) for s in scenarios), len(scenarios)
        self._shape = (rows, count)
        self._changing = [b for b, s in enumerate(scenarios) if s.changes]
        self._truth = BatchTruth([s.truth_at(0.0) for s in scenarios])
        self._stage, self._machine = self._truth.stage, self._truth.machine
        self.real = self._truth.real
        self.most, self.movable = np.ones(self._shape), np.zeros(self._shape, bool)
        """The most workers of each stage, and whether it has another back end than its first."""
        self._first_process = np.zeros(self._shape, bool)
        for b, scenario in enumerate(scenarios):
            own = slice(rows - len(scenario.stages), rows)
            self.most[own, b] = [scenario.limits.workers[s.name][1] for s in scenario.stages]
            self.movable[own, b] = [len(s.backends) > 1 for s in scenario.stages]
            self._first_process[own, b] = [s.backends[0] == "process" for s in scenario.stages]
        self.now, self._sequence = 0.0, 0
        self.queue, self.active, self.done, self.bytes = (np.zeros(self._shape) for _ in range(4))
        self.busy_s, self.cpu_s, self.core_wait_s, self.in_s, self.out_s = (
            np.zeros(self._shape) for _ in range(5)
        )
        self.consumed, self.wait_s, self.compute_s, self.used_s, self.held_back = (
            np.zeros(count) for _ in range(5)
        )
        self.killed, self.governor_acted = np.zeros(count, bool), np.zeros(count, bool)
        self._walk, self._burst_until = np.zeros(self._shape), np.full(self._shape, -1.0)
        self._burst_next = np.where(
            self._stage["burst_every_s"] > 0, self._drawn(self._stage["burst_every_s"]), np.inf
        )
        self._bucket = self._stage["credit_rows"].copy()
        self._item_bytes, self._row_bytes = (
            self._stage["held_bytes"].copy(),
            self._stage["bytes_per_row"].copy(),
        )
        self._flow = BatchFlow(self._truth)
        slowest = max(float(self._stage[name].max()) for name in ("start_s", "process_start_s"))
        self._joining = np.zeros((2 + math.ceil(slowest / CHUNK_S), *self._shape))
        """The starting workers, by the step at which they are ready."""
        self._coming, self._step = np.zeros(self._shape), 0
        self.knobs = self.knobs_of([s.first_knobs for s in scenarios])
        self.ready = self.knobs.workers.copy()
        self.memory = self._memory_wanted()
        self.peak = self.memory.copy()

    @property
    def cores(self) -> ndarray:
        return self._machine["cores"]

    @property
    def memory_limit(self) -> ndarray:
        return self._machine["memory_limit"]

    @property
    def rows_per_item(self) -> ndarray:
        return self._stage["rows_per_item"]

    def knobs_of(self, each: Sequence[Knobs]) -> BatchKnobs:
        """The knobs of all pipelines from those of each."""
        workers, process = np.ones(self._shape), self._first_process.copy()
        for b, (scenario, knobs) in enumerate(zip(self.scenarios, each, strict=True)):
            first = self._shape[0] - len(scenario.stages)
            for i, stage in enumerate(scenario.stages, start=first):
                workers[i, b] = knobs.workers[stage.name]
                process[i, b] = knobs.backend.get(stage.name, stage.backends[0]) == "process"
        return BatchKnobs(
            workers,
            process,
            np.array([float(k.read_ahead_bytes) for k in each]),
            np.array([float(k.prefetch_bytes) for k in each]),
        )

    def apply(self, knobs: BatchKnobs) -> None:
        """Puts the knobs in force, as far as the limits allow."""
        process = np.where(self.movable, knobs.process, self._first_process)
        workers = np.clip(np.rint(knobs.workers), 1, self.most)
        anew = process != self.knobs.process
        self._leave(anew)
        self.ready[anew] = 0.0
        more = workers - self.ready - self._coming
        fewer = more < 0
        self._leave(fewer)  # workers that have not started yet go first
        self.ready = np.where(fewer, np.minimum(self.ready, workers), self.ready)
        more = np.maximum(0.0, workers - self.ready - self._coming)
        delay = np.where(process, self._stage["process_start_s"], self._stage["start_s"])
        late = (more > 0) & (delay > 0)
        self.ready += np.where(late, 0.0, more)
        i, b = np.nonzero(late)
        steps = np.rint(delay[i, b] / CHUNK_S).astype(int)
        self._joining[(self._step + steps) % len(self._joining), i, b] += more[i, b]
        self._coming[i, b] += more[i, b]
        self.knobs = BatchKnobs(
            workers,
            process,
            np.clip(np.rint(knobs.read_ahead_bytes), 2**20, 2**36),
            np.clip(np.rint(knobs.prefetch_bytes), 2**20, 2**36),
        )

    def advance(self, seconds: float) -> None:
        """Lets time pass. `seconds` is a multiple of a quarter."""
        steps = round(seconds / CHUNK_S)
        if not math.isclose(steps * CHUNK_S, seconds):
            raise ValueError(f"seconds: {seconds!r} is no multiple of {CHUNK_S:g}")
        for _ in range(steps):
            self._pass_step()

    def snapshot(self, b: int) -> Snapshot:
        """Returns what the controller would see of one pipeline."""
        truth, rows = self._truth.truths[b], self._shape[0]
        limits = self.queue_limits()
        first = rows - len(truth.stages)
        stages = tuple(
            StageStats(
                name=stage.name,
                items=int(self.done[i, b] / stage.rows_per_item),
                rows=int(self.done[i, b]),
                bytes=int(self.bytes[i, b]),
                busy_s=float(self.busy_s[i, b]),
                cpu_s=float(self.cpu_s[i, b]),
                core_wait_s=float(self.core_wait_s[i, b]),
                wait_input_s=float(self.in_s[i, b]),
                wait_output_s=float(self.out_s[i, b]),
                workers=int(self.knobs.workers[i, b]),
                backend="process" if self.knobs.process[i, b] else "thread",
                queue_bytes=int(self.queue[i, b] * self._row_bytes[i, b]),
                queue_limit_bytes=int(limits[i, b] * self._row_bytes[i, b]),
            )
            for i, stage in enumerate(truth.stages, first)
        )
        self._sequence += 1
        return Snapshot(
            at=self.now,
            sequence=self._sequence,
            stages=stages,
            rows=int(self.consumed[b]),
            batches=int(self.consumed[b] / truth.consumer.batch_rows),
            consumer_wait_s=float(self.wait_s[b]),
            consumer_compute_s=float(self.compute_s[b]),
            memory_used=int(self.memory[b]),
            memory_limit=int(truth.machine.memory_limit),
            cpu_quota=truth.machine.cores,
            cpu_used_s=float(self.used_s[b]),
            held_back=int(self.held_back[b]),
        )

    def _drawn(self, mean: ndarray) -> ndarray:
        return np.asarray(mean * self._draw_for_stages(self._random.standard_exponential))

    def _draw_for_stages(self, draw: Callable[[tuple[int, ...]], ndarray], *times: int) -> ndarray:
        """Draws a number for each stage. Pipelines of one group get the same."""
        rows, count = self._shape
        return np.repeat(draw((*times, rows, count // self._alike)), self._alike, axis=-1)

    def _leave(self, some: ndarray) -> None:
        """Removes the workers of these stages that are still starting."""
        if (some & (self._coming > 0)).any():
            self._joining[:, some] = 0.0
            self._coming[some] = 0.0

    def queue_limits(self) -> ndarray:
        """How many rows may wait behind each stage. A queue takes at least one item of either neighbour."""
        rows, first = self._stage["rows_per_item"], self._truth.first
        limits = self._stage["buffer_items"] * rows
        width = np.maximum(1e-9, self._row_bytes)
        limits[first] = self.knobs.read_ahead_bytes / width[first]
        limits[-1] = self.knobs.prefetch_bytes / width[-1]
        after = np.concatenate([rows[1:], self._truth.consumer["batch_rows"][None]])
        return np.asarray(np.where(self.real, np.maximum(np.maximum(limits, rows), after), 0.0))

    def _own_bytes(self) -> ndarray:
        """The bytes that a worker of each stage holds for itself."""
        return np.where(
            self.knobs.process, self._stage["process_bytes"], self._stage["worker_bytes"]
        )

    def _memory_wanted(self) -> ndarray:
        held = (
            self.active * self._item_bytes
            + self.queue * self._row_bytes
            + self.ready * self._own_bytes()
        )
        return np.asarray(self._machine["base_bytes"] + (held * self.real).sum(axis=0))

    def _governed(self, limits: ndarray) -> tuple[ndarray, ndarray]:
        """Returns the workers that the governor admits, and the share of the queues' limits that it allows."""
        everything = np.ones(self._shape[1])
        if not self._governor:
            return self.ready, everything
        sizes = np.maximum(self._item_bytes, self._stage["held_bytes"])
        queued = (self.queue * self._row_bytes).sum(axis=0)
        waiting = (limits * self._stage["bytes_per_row"]).sum(axis=0)
        free = (
            GOVERNOR_FILLS * self._machine["memory_limit"]
            - self._machine["base_bytes"]
            - (self.ready * self._own_bytes() * self.real).sum(axis=0)
        )
        fits = (self.ready * sizes).sum(axis=0) + np.maximum(queued, waiting) <= free
        if fits.all():
            return self.ready, everything
        self.governor_acted |= ~fits
        asking = np.minimum(self.ready, self.active + 1)  # a worker without input needs nothing
        share = np.clip((free - queued) / np.maximum(1.0, (asking * sizes).sum(axis=0)), 0.0, 1.0)
        admitted = np.maximum(np.minimum(1.0, asking), asking * share)
        left = np.clip((free - (admitted * sizes).sum(axis=0)) / np.maximum(1.0, waiting), 0.0, 1.0)
        return np.where(fits, self.ready, admitted), np.where(fits, 1.0, left)

    def _pass_step(self) -> None:
        for b in self._changing:
            truth = self.scenarios[b].truth_at(self.now)
            if truth is not self._truth.truths[b]:
                self._truth.read(b, truth)
        turned = -np.expm1(-CHUNK_S / np.maximum(self._stage["cost_s"], 0.5))
        self._item_bytes += (self._stage["held_bytes"] - self._item_bytes) * turned
        self._row_bytes += (self._stage["bytes_per_row"] - self._row_bytes) * turned
        joining = self._joining[self._step % len(self._joining)]
        self.ready += joining
        self._coming -= joining
        joining[:] = 0.0
        self._step += 1
        limits = self.queue_limits()
        admitted, queue_share = self._governed(limits)
        self.held_back += ((self.ready - admitted) * self.real).sum(axis=0) * CHUNK_S * ~self.killed
        limits = np.where(
            queue_share < 1, np.where(self.real, np.maximum(1.0, limits * queue_share), 0.0), limits
        )
        factors, bursts = self._draw_costs()
        self._flow.settle(
            workers=admitted,
            process=self.knobs.process,
            starting=(self._coming * self.knobs.process).sum(axis=0),
            factors=factors,
            bursts=bursts,
            credit_rows=self._bucket,
            queue=self.queue,
            limits=limits,
        )
        self._account(admitted, limits)
        self.now += CHUNK_S

    def _draw_costs(self) -> tuple[ndarray, ndarray]:
        """Draws the factors on each stage's cost (tails, drift) and on its waiting (bursts)."""
        stage, normal = self._stage, self._draw_for_stages(self._random.standard_normal, 2)
        self._walk += stage["drift"] * math.sqrt(CHUNK_S) * normal[0]
        finished = np.maximum(1.0, self.ready * CHUNK_S / np.maximum(1e-9, stage["cost_s"]))
        spread = np.sqrt(np.log1p(stage["tail"] ** 2 / finished))
        factors = np.exp(self._walk + spread * normal[1] - spread * spread / 2)
        begins = self.now >= self._burst_next
        if begins.any():
            self._burst_until = np.where(
                begins, self.now + self._drawn(stage["burst_s"]), self._burst_until
            )
            self._burst_next = np.where(
                begins, self._burst_until + self._drawn(stage["burst_every_s"]), self._burst_next
            )
        return factors, np.where(self.now < self._burst_until, stage["burst_factor"], 1.0)

    def _account(self, admitted: ndarray, limits: ndarray) -> None:
        stage = self._stage
        real = self.real
        alive = ~self.killed
        flow = self._flow
        rates, busy = flow.rates * alive, flow.busy * alive
        rows = np.where(real, rates[:-1] * CHUNK_S, 0.0)
        self.done += rows
        self.bytes += rows * self._row_bytes
        before = self.queue
        self.queue = np.where(real, np.maximum(0.0, self.queue + rows - rates[1:] * CHUNK_S), 0.0)
        self._bucket = np.clip(
            self._bucket + stage["cap_rows_per_s"] * CHUNK_S - rows, 0.0, stage["credit_rows"]
        )
        self.active = np.where(real, admitted * busy[:-1], 0.0)
        items, useful = rows / stage["rows_per_item"], self.active * CHUNK_S
        calm = (
            stage["sigma"]
            * np.maximum(0.0, admitted - np.maximum(1.0, self.active))
            * stage["cost_s"]
        )
        useful = useful - np.minimum(
            items * calm, 0.5 * useful
        )  # fewer at work disturb each other less
        used = np.minimum(items * flow.cpu_per_item, useful)
        waited = np.minimum(used * (flow.slow - 1), useful - used)
        noise = np.maximum(
            0.5,
            1
            + self._machine["timer_noise"] * self._draw_for_stages(self._random.standard_normal, 2),
        )
        self.busy_s += useful * noise[0]
        self.cpu_s += used * noise[1]
        self.core_wait_s += waited * noise[1]
        idle = np.where(real & alive, (self.ready - self.active) * CHUNK_S, 0.0)
        blocked = self.queue >= 0.999 * limits
        starved, tight = np.zeros(self._shape, bool), np.zeros(self._shape, bool)
        starved[1:] = real[:-1] & (before[:-1] <= 1e-3 * limits[:-1])
        tight[1:] = rates[:-2] <= rates[2:]
        out = blocked & ~(starved & tight)
        self.out_s += np.where(out, idle, 0.0)
        self.in_s += np.where(out, 0.0, idle)
        self.consumed += rates[-1] * CHUNK_S
        self.compute_s += busy[-1] * CHUNK_S
        self.wait_s += (1 - busy[-1]) * CHUNK_S
        self.used_s += flow.used_cores * alive * CHUNK_S
        wanted, lag = self._memory_wanted(), self._machine["memory_lag_s"]
        falling = (wanted < self.memory) & (lag > 0)
        fading = wanted + (self.memory - wanted) * np.exp(-CHUNK_S / np.maximum(lag, 1e-9))
        self.memory = np.where(alive, np.where(falling, fading, wanted), self.memory)
        self.peak = np.maximum(self.peak, self.memory)
        self.killed |= self.memory > self._machine["memory_limit"]
