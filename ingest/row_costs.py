"""Predicts a pipeline's rate under other conditions from what a row costs now: `RowCosts`. Does no I/O.

The costs come from two snapshots of a running pipeline (`RowCosts.between`), or from a run's records
(`RowCosts.of_looks`). The slowest stage, the consumer and the cores limit the rate. If other programs want the cores
too, all threads share them, and each second of work takes longer. The ratio of measured to predicted rate covers
everything that the model leaves out. It is assumed to stay the same.
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
"""Processor seconds that this host needs to receive a byte of a row from a remote worker."""
_HALVINGS = 60
_IDLE = 0.05  # idle cores; with more, other programs do not slow this one
_SETTLED = 1 / 3  # share of a run's records, at its end, that is used
_NOTHING = 1e-12  # seconds a row that do not limit the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The time that one worker needs for a row: processor seconds and seconds of waiting."""

    workers: float
    cpu_s: float
    wait_s: float = 0.0
    """Seconds of waiting for a store, a service or a lock, and for a core if `others` does not account for that."""
    core_wait_s: float = 0.0
    """The part of `wait_s` in which it was ready to run but had no core. 0 if that was not recorded."""

    def capacity(self, slow: float) -> float:
        """Rows a second if a second of work takes `slow` seconds."""
        seconds = slow * self.cpu_s + self.wait_s
        return self.workers / seconds if seconds > _NOTHING else math.inf

    def with_waits(self, before: Share, others_s: tuple[float, float]) -> Share:
        """Returns the share with waits that fit its new work. `others_s` has the processor seconds a row of all other
        threads, with the share as `before` and now.

        Those threads can delay a worker by at most what they need for one row. If the worker waited longer for a core,
        other programs had it, so each second of work takes longer. The rest of the wait is a store's and stays."""
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
    """The cost of a row in all stages, and the measured rate."""

    stages: Mapping[str, Share]
    head: Mapping[str, str] = field(default_factory=dict)
    """For each fused stage, the stage whose workers do its work."""
    consumer: Share = Share(workers=1, cpu_s=0.0)
    other_cpu_s: float = 0.0
    """Processor seconds a row outside of stages and consumer."""
    cores: float
    others: float = 0.0
    """The average number of threads of other programs that want a core."""
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
        """Computes the costs between two snapshots. `head` returns the stage whose workers do a stage's work, and the
        work counts for that stage. The consumer needs `step_s` for a row if it never waits for one, `step_cpu_s` of it
        on a processor."""
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
        """Computes the costs at the end of a run, under its last knobs, from its records (`metrics.jsonl`). None: the
        run was too short. Each stage is separate, with all its waits."""
        looks = [look for look in looks if look.get("rows_per_s") and look.get("stages")]
        looks = [look for look in looks if look["knobs"] == looks[-1]["knobs"]]
        looks = looks[-max(1, round(_SETTLED * len(looks))) :]
        rows = sum(look["rows_per_s"] for look in looks)
        if not rows:
            return None
        last = looks[-1]

        def total(name: str, what: str) -> float:
            return sum(look["stages"].get(name, {}).get(what) or 0.0 for look in looks)

        def each(name: str, what: str) -> float:  # a row that the stage itself passed on
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
        """Processor seconds a row, all parts together."""
        return (
            self.other_cpu_s
            + self.consumer.cpu_s
            + sum(stage.cpu_s for stage in self.stages.values())
        )

    @property
    def narrowest(self) -> str:
        """The stage that would limit the rate if cores were free."""
        workers = self._workers()
        return min(workers, key=lambda name: workers[name].capacity(1.0))

    @property
    def bound(self) -> float:
        """The rows a second that the model predicts."""
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
        """Returns the work of each stage's workers, including their work for fused stages."""
        found: dict[str, Share] = {}
        for name, share in self.stages.items():
            head = self.head.get(name, name)
            known = found.get(head, Share(workers=self.stages.get(head, share).workers, cpu_s=0.0))
            found[head] = replace(
                known, cpu_s=known.cpu_s + share.cpu_s, wait_s=known.wait_s + share.wait_s
            )
        return found

    def _slow(self, rate: float) -> float:
        """Returns how many seconds a second of work takes at this rate, if all threads that want a core get an equal
        part."""
        left = self.cores - rate * self.cpu_s
        if left > 1e-9:
            return max(1.0, self.others / left)
        if self.others:
            return math.inf
        return 1.0

    def rate(self, then: RowCosts) -> float:
        """Predicts the rows a second under the costs `then`. The model's error is assumed to be the same for both."""
        now = self.bound
        return (
            min(then.consumer.capacity(1.0), self.measured * then.bound / now)
            if math.isfinite(now) and now > 0
            else self.measured
        )

    # ---- other conditions

    def with_workers(self, name: str, workers: float) -> RowCosts:
        return replace(
            self, stages={**self.stages, name: replace(self.stages[name], workers=workers)}
        )

    def with_cores(self, cores: float) -> RowCosts:
        return replace(self, cores=cores)

    def with_store(self, times: float) -> RowCosts:
        """With a store that is `times` as fast. Infinity: all files are in a cache on this host."""
        read = self.stages[READ.name]
        return replace(
            self, stages={**self.stages, READ.name: replace(read, wait_s=read.wait_s / times)}
        )

    def with_consumer(self, times: float) -> RowCosts:
        """With a consumer that is `times` as fast."""
        return replace(
            self,
            consumer=replace(
                self.consumer,
                cpu_s=self.consumer.cpu_s / times,
                wait_s=self.consumer.wait_s / times,
            ),
        )

    def with_remote(self, workers: float, *, cores: float = math.inf) -> RowCosts:
        """With remote workers that read. This host receives each row. The workers have `cores` of their own. With 0,
        they use this host's cores, which then also pack each row."""
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
        """With stages that need `more_s` more processor seconds a row. A stage's wait for other threads changes with
        their work."""
        stages = {
            name: replace(share, cpu_s=max(0.0, share.cpu_s + more_s.get(name, 0.0)))
            for name, share in self.stages.items()
        }
        now, after = self.cpu_s, replace(self, stages=stages).cpu_s
        for name, share in stages.items():
            before = self.stages[name]
            stages[name] = share.with_waits(
                before,
                (
                    now - before.cpu_s / max(1.0, before.workers),
                    after - share.cpu_s / max(1.0, share.workers),
                ),
            )
        return replace(self, stages=stages)

    def cases(self) -> dict[str, float]:
        """Returns the predicted rows a second for each of several changes."""
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
    """Estimates how many threads of other programs want a core, from how long ours wait for one. If all threads share
    the cores fairly, our share of the time is our share of the threads."""
    cores, seconds = after.cpu_quota, after.at - before.at
    if before.cores_idle_s is None or after.cores_idle_s is None or running <= 0:
        return 0.0
    idle = (after.cores_idle_s - before.cores_idle_s) / seconds
    taken = max(0.0, cores - idle - used)  # by other programs
    return taken * (running + waiting) / running if idle < cores and taken > _IDLE else 0.0
