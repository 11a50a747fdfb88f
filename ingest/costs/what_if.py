"""What a pipeline would do under other conditions, from what a row costs now: `RowCosts`. Pure.

A pipeline is as fast as its narrowest stage, its consumer and its cores allow. Where other programs want the cores too,
all threads that want one share them: the nearer ours come to what is left, the longer each second of work takes. What
the model leaves out is measured at the same time, as one factor, and taken to stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sluice.ingest.stage_spec import READ
from sluice.ingest.stats import Snapshot

RECEIVED_S = 1.1e-9
"""Processor seconds that a byte of a row costs here when a worker elsewhere read it (docs/LOG.md, 2026-11-22)."""
_HALVINGS = 60
_IDLE = 0.05  # cores without work; with more, nobody is in our way


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a row takes of one worker: seconds of a processor, and seconds that it waits for a store or a service."""

    workers: float
    cpu_s: float
    store_s: float = 0.0

    def capacity(self, slow: float) -> float:
        """Rows a second, if a second of work takes `slow` seconds."""
        seconds = slow * self.cpu_s + self.store_s
        return self.workers / seconds if seconds > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """What a row costs everywhere, and the rate that came of it."""

    stages: Mapping[str, Share]
    """The stages that have workers of their own; a fused one is part of the stage whose workers do its work."""
    consumer: Share = Share(workers=1, cpu_s=0.0)
    other_cpu_s: float = 0.0
    """Processor seconds a row that neither a stage nor the consumer accounts for."""
    cores: float
    others: float = 0.0
    """How many threads of other programs want a core on average."""
    row_bytes: float = 0.0
    measured: float
    """Rows a second."""

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot, *, head: Callable[[str], str] = lambda name: name,
                step_s: float = 0.0, step_cpu_s: float = 0.0) -> RowCosts:
        """The costs between two snapshots. `head` names the stage whose workers do a stage's work. The consumer takes
        `step_s` for a row if nothing is in its way, `step_cpu_s` of it on a processor."""
        seconds, rows = max(after.at - before.at, 1e-9), max(1, after.rows - before.rows)
        stages: dict[str, Share] = {}
        running = waiting = 0.0
        for stage in after.stages:
            was, name = before.stage(stage.name), head(stage.name)
            passed = (stage.rows - was.rows) or rows
            cpu, core_wait = stage.cpu_s - was.cpu_s, stage.core_wait_s - was.core_wait_s
            away = max(0.0, stage.busy_s - was.busy_s - cpu - core_wait)
            known = stages.get(name, Share(workers=stage.workers, cpu_s=0.0))
            stages[name] = replace(known, cpu_s=known.cpu_s + cpu / passed, store_s=known.store_s + away / passed)
            running, waiting = running + cpu / seconds, waiting + core_wait / seconds
        used = (after.cpu_used_s - before.cpu_used_s) / seconds
        in_stages = sum(share.cpu_s for share in stages.values())
        return cls(stages=stages, consumer=Share(workers=1, cpu_s=step_cpu_s, store_s=max(0.0, step_s - step_cpu_s)),
                   other_cpu_s=max(0.0, used * seconds / rows - in_stages - step_cpu_s), cores=after.cpu_quota,
                   others=_others(before, after, used, running, waiting), measured=rows / seconds,
                   row_bytes=(after.stages[-1].bytes - before.stages[-1].bytes) / rows)

    @property
    def cpu_s(self) -> float:
        """Processor seconds a row of everything together."""
        return self.other_cpu_s + self.consumer.cpu_s + sum(stage.cpu_s for stage in self.stages.values())

    @property
    def narrowest(self) -> str:
        """The stage that would bound the rate if cores were free."""
        return min(self.stages, key=lambda name: self.stages[name].capacity(1.0))

    @property
    def bound(self) -> float:
        """The rows a second that all of this allows."""
        low, high = 0.0, min(self._allowed(1.0), self.cores / self.cpu_s if self.cpu_s > 0 else math.inf)
        if not math.isfinite(high) or self._allowed(self._slow(high)) >= high:
            return high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._allowed(self._slow(middle)) >= middle else (low, middle)
        return low

    def _allowed(self, slow: float) -> float:
        return min(part.capacity(slow) for part in (*self.stages.values(), self.consumer))

    def _slow(self, rate: float) -> float:
        """How many seconds a second of work takes at a rate: all who want a core get an equal part."""
        left = self.cores - rate * self.cpu_s
        return max(1.0, self.others / left) if left > 1e-9 else math.inf if self.others else 1.0

    def rate(self, then: RowCosts) -> float:
        """The rows a second of other costs: what the model leaves out, it leaves out of both."""
        now = self.bound
        return self.measured * then.bound / now if math.isfinite(now) and now > 0 else self.measured

    # ---- the cases

    def with_workers(self, name: str, workers: float) -> RowCosts:
        return replace(self, stages={**self.stages, name: replace(self.stages[name], workers=workers)})

    def with_cores(self, cores: float) -> RowCosts:
        return replace(self, cores=cores)

    def with_store(self, times: float) -> RowCosts:
        """With a store that answers so many times as fast; infinity: files that lie in a cache of this host."""
        read = self.stages[READ.name]
        return replace(self, stages={**self.stages, READ.name: replace(read, store_s=read.store_s / times)})

    def with_consumer(self, times: float) -> RowCosts:
        """With a consumer that is so many times as fast."""
        return replace(self, consumer=replace(self.consumer, cpu_s=self.consumer.cpu_s / times,
                                              store_s=self.consumer.store_s / times))

    def with_remote(self, workers: float, *, cores: float = math.inf) -> RowCosts:
        """With workers elsewhere that read. Here each row is received; they have `cores` of their own, or 0: those of
        this host, where a row is packed as well."""
        read = self.stages[READ.name]
        received = RECEIVED_S * self.row_bytes
        row_s = read.cpu_s + read.store_s
        if cores:
            row_s = max(row_s, workers * read.cpu_s / cores)
        stages = {**self.stages, READ.name: Share(workers=workers, cpu_s=0.0, store_s=row_s)}
        return replace(self, stages=stages,
                       other_cpu_s=self.other_cpu_s + received + (0.0 if cores else received + read.cpu_s))

    def cases(self) -> dict[str, float]:
        """What each change would bring, in rows a second of what was measured."""
        name = self.narrowest
        more = int(self.stages[name].workers) + 1
        changes = {f"{more} workers in {name}": self.with_workers(name, more),
                   "twice the cores": self.with_cores(2 * self.cores),
                   "a store twice as fast": self.with_store(2.0), "files in a cache": self.with_store(math.inf),
                   "a consumer twice as fast": self.with_consumer(2.0),
                   "4 workers elsewhere that read": self.with_remote(4)}
        return {what: self.rate(then) for what, then in changes.items()}


def _others(before: Snapshot, after: Snapshot, used: float, running: float, waiting: float) -> float:
    """How many threads of other programs want a core, by how long ours wait for one: of cores that all share fairly,
    our part of the time is our part of those who want one."""
    cores, seconds = after.cpu_quota, after.at - before.at
    if before.cores_idle_s is None or after.cores_idle_s is None or running <= 0:
        return 0.0
    idle = (after.cores_idle_s - before.cores_idle_s) / seconds
    taken = max(0.0, cores - idle - used)  # by other programs
    return taken * (running + waiting) / running if idle < cores and taken > _IDLE else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a training step takes on one rank alone: so much for a step, so much for each of its rows, and, beside
    others, so much until all ranks agree."""

    fixed_s: float
    row_s: float
    sync_s: Mapping[int, float]
    """Ranks → seconds a step."""

    @classmethod
    def of(cls, small: tuple[int, float], large: tuple[int, float], sync_s: Mapping[int, float]) -> StepCost:
        """From two measured steps, each its rows and seconds."""
        row_s = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(fixed_s=max(0.0, small[1] - row_s * small[0]), row_s=row_s, sync_s={1: 0.0, **sync_s})

    def seconds(self, rows: float, ranks: int) -> float:
        return self.fixed_s + self.row_s * rows + self.sync_s[ranks]


def ranks_table(paces: Mapping[int, RowCosts], step: StepCost, ranks: Sequence[int], workers: Iterable[int]
                ) -> dict[tuple[int, int, int], float]:
    """(ranks, batch, workers of the narrowest stage a rank) → rows a second of all ranks on one host.

    `paces` has for each global batch what one rank without a consumer costs, with batches of that size."""
    found = {}
    for many in workers:
        for batch, pace in paces.items():
            for count in ranks:
                each = step.seconds(batch / count, count) * count / batch  # of a rank's row
                cpu_s = min(each, (step.fixed_s * count / batch) + step.row_s)
                stages = {name: replace(share, workers=count * (many if name == pace.narrowest else share.workers))
                          for name, share in pace.stages.items()}
                found[count, batch, many] = pace.rate(replace(
                    pace, stages=stages, consumer=Share(workers=count, cpu_s=cpu_s, store_s=max(0.0, each - cpu_s))))
    return found
