"""What a pipeline would do under other conditions, from what a row costs now: `RowCosts`. Pure.

The costs come from two snapshots of a live pipeline (`RowCosts.between`), or from what a run has on record
(`RowCosts.of_looks`). A pipeline is as fast as its narrowest stage, its consumer and its cores allow. Where other
programs want the cores too, all threads that want one share them: the nearer ours come to what is left, the longer each
second of work takes. What the model leaves out is measured at the same time, as one factor, and taken to stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sluice.ingest.stage_spec import READ
from sluice.ingest.stats import Snapshot

RECEIVED_S = 1.1e-9
"""Processor seconds that a byte of a row costs here when a worker elsewhere read it (docs/log, 2026-11-22)."""
_HALVINGS = 60
_IDLE = 0.05  # cores without work; with more, nobody is in our way
_SETTLED = 1 / 3  # of the looks of a run, at its end
_NOTHING = 1e-12  # seconds a row that bound no rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a row takes of one worker: seconds of a processor, and seconds that it waits for something else."""

    workers: float
    cpu_s: float
    wait_s: float = 0.0
    """Seconds that it waits for a store, a service or a lock; for a core too, if `others` does not account for that."""
    core_wait_s: float = 0.0
    """Those of them in which it was ready to run and had no core; 0 if that was not recorded."""

    def capacity(self, slow: float) -> float:
        """Rows a second, if a second of work takes `slow` seconds."""
        seconds = slow * self.cpu_s + self.wait_s
        return self.workers / seconds if seconds > _NOTHING else math.inf

    def beside(self, before: Share, others_s: tuple[float, float]) -> Share:
        """The share with its waits. When it was as `before`, threads beside one of its workers took the first of
        `others_s` in processor seconds a row; now they take the second.

        While a worker does a row, at most what those threads take for one row can be in its way. If it had no core
        beyond that, other programs had the core, so each second of work takes longer. The rest of the wait is a
        store's."""
        then, now = others_s
        way = min(before.wait_s, then * before.workers)
        programs = min(before.wait_s - way, before.core_wait_s)
        return replace(
            self,
            wait_s=(way * now / then if then > 0 else 0.0)
            + (programs * self.cpu_s / before.cpu_s if before.cpu_s > 0 else 0.0)
            + before.wait_s
            - way
            - programs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """What a row costs everywhere, and the rate that came of it."""

    stages: Mapping[str, Share]
    head: Mapping[str, str] = field(default_factory=dict)
    """The stage whose workers do a stage's work, for each stage that has no workers of its own."""
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
    def between(
        cls,
        before: Snapshot,
        after: Snapshot,
        *,
        head: Callable[[str], str] = lambda name: name,
        step_s: float = 0.0,
        step_cpu_s: float = 0.0,
    ) -> RowCosts:
        """The costs between two snapshots, in which a stage that another one's workers do is a part of that one. `head`
        names the stage whose workers do a stage's work. The consumer takes `step_s` for a row if nothing is in its way,
        `step_cpu_s` of it on a processor."""
        seconds, rows = max(after.at - before.at, 1e-9), max(1, after.rows - before.rows)
        stages: dict[str, Share] = {}
        running = waiting = 0.0
        for stage in after.stages:
            was, name = before.stage(stage.name), head(stage.name)
            passed = (stage.rows - was.rows) or rows
            cpu, core_wait = stage.cpu_s - was.cpu_s, stage.core_wait_s - was.core_wait_s
            away = max(0.0, stage.busy_s - was.busy_s - cpu - core_wait)
            known = stages.get(name, Share(workers=stage.workers, cpu_s=0.0))
            stages[name] = replace(
                known, cpu_s=known.cpu_s + cpu / passed, wait_s=known.wait_s + away / passed
            )
            running, waiting = running + cpu / seconds, waiting + core_wait / seconds
        used = (after.cpu_used_s - before.cpu_used_s) / seconds
        in_stages = sum(share.cpu_s for share in stages.values())
        return cls(
            stages=stages,
            consumer=Share(workers=1, cpu_s=step_cpu_s, wait_s=max(0.0, step_s - step_cpu_s)),
            other_cpu_s=max(0.0, used * seconds / rows - in_stages - step_cpu_s),
            cores=after.cpu_quota,
            others=_others(before, after, used, running, waiting),
            measured=rows / seconds,
            row_bytes=(after.stages[-1].bytes - before.stages[-1].bytes) / rows,
        )

    @classmethod
    def of_looks(cls, looks: Sequence[Mapping[str, Any]]) -> RowCosts | None:
        """The costs at the end of a run, under its last knobs, by what it has on record of its loader
        (`metrics.jsonl`). None if the run did not last long enough. Each stage is kept apart, with all that it waited
        for."""
        looks = [look for look in looks if look.get("rows_per_s") and look.get("stages")]
        looks = [look for look in looks if look["knobs"] == looks[-1]["knobs"]]
        looks = looks[-max(1, round(_SETTLED * len(looks))) :]
        rows = sum(look["rows_per_s"] for look in looks)
        if not rows:
            return None
        last = looks[-1]

        def total(name: str, what: str) -> float:
            return sum(look["stages"].get(name, {}).get(what) or 0.0 for look in looks)

        def each(
            name: str, what: str
        ) -> float:  # of the rows that the stage itself passed on meanwhile
            return total(name, what) / (total(name, "rows_per_s") or rows)

        stages = {
            name: Share(
                workers=stage["workers"],
                cpu_s=each(name, "cpu"),
                core_wait_s=each(name, "core_wait"),
                wait_s=max(0.0, each(name, "busy") - each(name, "cpu")),
            )
            for name, stage in last["stages"].items()
        }
        names, head = list(stages), dict[str, str]()
        for before, name in itertools.pairwise(names):
            if name in last["knobs"].get("fused", ()):
                head[name] = head.get(before, before)
        step_s = (
            sum(
                look["rows_per_s"] / look["demand_rows_per_s"]
                for look in looks
                if look.get("demand_rows_per_s")
            )
            / rows
        )
        others = sum(look.get("cpu") or 0.0 for look in looks) - sum(
            total(name, "cpu") for name in stages
        )
        return cls(
            stages=stages,
            head=head,
            consumer=Share(workers=1, cpu_s=0.0, wait_s=step_s),
            other_cpu_s=max(0.0, others / rows),
            cores=last["cpu_quota"] or math.inf,
            measured=rows / len(looks),
        )

    @property
    def cpu_s(self) -> float:
        """Processor seconds a row of everything together."""
        return (
            self.other_cpu_s
            + self.consumer.cpu_s
            + sum(stage.cpu_s for stage in self.stages.values())
        )

    @property
    def narrowest(self) -> str:
        """The stage that would bound the rate if cores were free."""
        workers = self._workers()
        return min(workers, key=lambda name: workers[name].capacity(1.0))

    @property
    def bound(self) -> float:
        """The rows a second that all of this allows."""
        parts = (*self._workers().values(), self.consumer)

        def is_allowed(rate: float) -> bool:
            slow = self._slow(rate)
            return min(part.capacity(slow) for part in parts) >= rate

        low, high = 0.0, min(part.capacity(1.0) for part in parts)
        if self.cpu_s > 0:
            high = min(high, self.cores / self.cpu_s)
        if not math.isfinite(high) or is_allowed(high):
            return high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if is_allowed(middle) else (low, middle)
        return low

    def _workers(self) -> dict[str, Share]:
        """All that the workers of each stage do, with what they do of other stages."""
        found: dict[str, Share] = {}
        for name, share in self.stages.items():
            head = self.head.get(name, name)
            known = found.get(head, Share(workers=self.stages.get(head, share).workers, cpu_s=0.0))
            found[head] = replace(
                known, cpu_s=known.cpu_s + share.cpu_s, wait_s=known.wait_s + share.wait_s
            )
        return found

    def _slow(self, rate: float) -> float:
        """How many seconds a second of work takes at a rate: all who want a core get an equal part."""
        left = self.cores - rate * self.cpu_s
        if left > 1e-9:
            return max(1.0, self.others / left)
        if self.others:
            return math.inf
        return 1.0

    def rate(self, then: RowCosts) -> float:
        """The rows a second of other costs: what the model leaves out, it leaves out of both."""
        now = self.bound
        return (
            min(then.consumer.capacity(1.0), self.measured * then.bound / now)
            if math.isfinite(now) and now > 0
            else self.measured
        )

    # ---- the cases

    def with_workers(self, name: str, workers: float) -> RowCosts:
        return replace(
            self, stages={**self.stages, name: replace(self.stages[name], workers=workers)}
        )

    def with_cores(self, cores: float) -> RowCosts:
        return replace(self, cores=cores)

    def with_store(self, times: float) -> RowCosts:
        """With a store that answers so many times as fast; infinity: files that lie in a cache of this host."""
        read = self.stages[READ.name]
        return replace(
            self, stages={**self.stages, READ.name: replace(read, wait_s=read.wait_s / times)}
        )

    def with_consumer(self, times: float) -> RowCosts:
        """With a consumer that is so many times as fast."""
        return replace(
            self,
            consumer=replace(
                self.consumer,
                cpu_s=self.consumer.cpu_s / times,
                wait_s=self.consumer.wait_s / times,
            ),
        )

    def with_remote(self, workers: float, *, cores: float = math.inf) -> RowCosts:
        """With workers elsewhere that read. Here each row is received; they have `cores` of their own, or 0: those of
        this host, where a row is packed as well."""
        read = self.stages[READ.name]
        received = RECEIVED_S * self.row_bytes
        row_s = read.cpu_s + read.wait_s
        if cores:
            row_s = max(row_s, workers * read.cpu_s / cores)
        stages = {**self.stages, READ.name: Share(workers=workers, cpu_s=0.0, wait_s=row_s)}
        return replace(
            self,
            stages=stages,
            other_cpu_s=self.other_cpu_s + received + (0.0 if cores else received + read.cpu_s),
        )

    def with_work(self, more_s: Mapping[str, float]) -> RowCosts:
        """With stages that take so much more of a processor for a row. What a stage waits for others changes with what
        these take."""
        stages = {
            name: replace(share, cpu_s=max(0.0, share.cpu_s + more_s.get(name, 0.0)))
            for name, share in self.stages.items()
        }
        now, after = self.cpu_s, replace(self, stages=stages).cpu_s
        for name, share in stages.items():
            before = self.stages[name]
            stages[name] = share.beside(
                before,
                (
                    now - before.cpu_s / max(1.0, before.workers),
                    after - share.cpu_s / max(1.0, share.workers),
                ),
            )
        return replace(self, stages=stages)

    def cases(self) -> dict[str, float]:
        """What each change would bring, in rows a second of what was measured."""
        name = self.narrowest
        more = int(self.stages[name].workers) + 1
        changes = {
            f"{more} workers in {name}": self.with_workers(name, more),
            "twice the cores": self.with_cores(2 * self.cores),
            "a store twice as fast": self.with_store(2.0),
            "files in a cache": self.with_store(math.inf),
            "a consumer twice as fast": self.with_consumer(2.0),
            "4 workers elsewhere that read": self.with_remote(4),
        }
        return {what: self.rate(then) for what, then in changes.items()}


def _others(
    before: Snapshot, after: Snapshot, used: float, running: float, waiting: float
) -> float:
    """How many threads of other programs want a core, by how long ours wait for one: of cores that all share fairly,
    our part of the time is our part of those who want one."""
    cores, seconds = after.cpu_quota, after.at - before.at
    if before.cores_idle_s is None or after.cores_idle_s is None or running <= 0:
        return 0.0
    idle = (after.cores_idle_s - before.cores_idle_s) / seconds
    taken = max(0.0, cores - idle - used)  # by other programs
    return taken * (running + waiting) / running if idle < cores and taken > _IDLE else 0.0
