"""A pipeline without data for tests: `FakePipeline`, a Tunable over stages of known cost. Deterministic. `tune` has a
policy tune it, and `look` lets a controller look once a second.

Work is a fluid: in each slice of time a stage does what its workers, its input and the room behind it allow, and all
stages share the cores. So the best setting is known by arithmetic (`best_rows_per_s`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sluice import Knobs
from sluice.agent.tunable import Tunable
from tests.product import Controller, Limits, Policy, Reason, Snapshot, StageStats, make

_SLICE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStage:
    """One stage and the cost of its items to a worker: processor time, and time waiting for a store."""

    name: str
    cpu_s: float = 0.0
    wait_s: float = 0.0
    item_bytes: int = 2**20
    most: int = 64
    bend: Callable[[int], float] = field(default=lambda workers: 1.0)
    """Number of workers → factor on the waiting time: how they disturb each other."""

    def service_s(self, workers: int) -> float:
        return self.cpu_s + self.wait_s * self.bend(workers)


class FakePipeline:
    """The pipeline. `advance(seconds)` moves its clock; the rest is a Tunable. Public fields may be changed during a
    run."""

    def __init__(
        self,
        stages: list[FakeStage],
        *,
        cores: float = 2.0,
        step_s: float = 0.0,
        rows: int = 1000,
        workers: Mapping[str, int] | None = None,
        memory_limit: int = 2**34,
        base_bytes: int = 2**28,
    ) -> None:
        self.stages, self.cores, self.step_s, self.rows_an_item = stages, cores, step_s, rows
        self.memory_limit, self.base_bytes = memory_limit, base_bytes
        self.now = 0.0
        self.applied: list[Knobs] = []
        self.told: dict[str, Any] = {}
        """What its snapshots say in place of what is true."""
        self._knobs = self.limits.clamp(Knobs(workers=workers or {}))
        self._queues = [0.0] * len(stages)  # items that wait behind each stage
        self._sums = {
            s.name: dict.fromkeys(("items", "busy", "cpu", "starved", "blocked"), 0.0)
            for s in stages
        }
        self._taken = self._wait = self._cpu = 0.0
        self._sequence = 0

    @property
    def limits(self) -> Limits:
        return Limits(workers={s.name: (1, s.most) for s in self.stages})

    @property
    def knobs(self) -> Knobs:
        return self._knobs

    def apply(self, knobs: Knobs) -> None:
        self.limits.check(knobs)
        self._knobs = knobs
        self.applied.append(knobs)

    def advance(self, seconds: float) -> None:
        for _ in range(round(seconds / _SLICE_S)):
            self._slice()
            self.now += _SLICE_S

    def _slice(self) -> None:
        takes = min(self._queues[-1], _SLICE_S / self.step_s if self.step_s else math.inf)
        self._queues[-1] -= takes
        self._taken += takes
        self._wait += _SLICE_S - takes * self.step_s
        done, limits = [0.0] * len(self.stages), ["workers"] * len(self.stages)
        for i in reversed(
            range(len(self.stages))
        ):  # from the end, so that a stage sees the room made after it
            stage, workers = self.stages[i], self._knobs.workers[self.stages[i].name]
            can = workers * _SLICE_S / stage.service_s(workers)
            given = self._queues[i - 1] if i else math.inf
            room = self._room(i) - self._queues[i]
            done[i] = max(0.0, min(can, given, room))
            limits[i] = "input" if given < min(can, room) else "output" if room < can else "workers"
            self._queues[i] += done[i]
            if i:
                self._queues[i - 1] -= done[i]
        asked = sum(n * s.cpu_s for n, s in zip(done, self.stages, strict=True))
        share = min(1.0, self.cores * _SLICE_S / asked) if asked else 1.0
        for i, stage in enumerate(self.stages):
            undone = done[i] * (
                1 - share
            )  # there were too few cores: this is left for the next slice
            done[i] -= undone
            self._queues[i] -= undone
            if i:
                self._queues[i - 1] += undone
            self._count(stage, done[i], limits[i], share)

    def _count(self, stage: FakeStage, items: float, limit: str, share: float) -> None:
        sums, workers = self._sums[stage.name], self._knobs.workers[stage.name]
        slowed = stage.service_s(workers) + stage.cpu_s * (
            1 / share - 1
        )  # a wait for a core looks like useful time
        busy = min(workers * _SLICE_S, items * slowed)
        sums["items"] += items
        sums["busy"] += busy
        sums["cpu"] += items * stage.cpu_s
        sums["starved" if limit == "input" else "blocked"] += workers * _SLICE_S - busy
        self._cpu += items * stage.cpu_s

    def _room(self, i: int) -> float:
        """How many items may wait behind a stage: behind the first and last, what the knobs say; in between, what its
        workers do in two slices."""
        if i == len(self.stages) - 1:
            return self._knobs.prefetch_bytes / self.stages[i].item_bytes
        if i == 0:
            return self._knobs.read_ahead_bytes / self.stages[i].item_bytes
        workers = self._knobs.workers[self.stages[i].name]
        return 2 * workers * max(1.0, _SLICE_S / self.stages[i].service_s(workers))

    def snapshot(self) -> Snapshot:
        stats = []
        for i, stage in enumerate(self.stages):
            sums, workers = self._sums[stage.name], self._knobs.workers[stage.name]
            items = int(sums["items"])
            stats.append(
                StageStats(
                    name=stage.name,
                    items=items,
                    rows=items * self.rows_an_item,
                    bytes=items * stage.item_bytes,
                    busy_s=sums["busy"],
                    finished_s=sums["busy"],
                    cpu_s=sums["cpu"],
                    wait_input_s=sums["starved"],
                    wait_output_s=sums["blocked"],
                    workers=workers,
                    queue_bytes=int(max(0.0, self._queues[i]) * stage.item_bytes),
                    queue_limit_bytes=int(self._room(i) * stage.item_bytes),
                )
            )
        held = sum(
            s.queue_bytes + s.workers * stage.item_bytes
            for s, stage in zip(stats, self.stages, strict=True)
        )
        self._sequence += 1
        seen = Snapshot(
            at=self.now,
            sequence=self._sequence,
            stages=tuple(stats),
            batches=int(self._taken),
            rows=int(self._taken) * self.rows_an_item,
            consumer_wait_s=max(0.0, self._wait),
            consumer_compute_s=self._taken * self.step_s,
            memory_used=self.base_bytes + held,
            memory_limit=self.memory_limit,
            cpu_quota=self.cores,
            cpu_used_s=self._cpu,
        )
        return replace(seen, **self.told)

    def rows_per_s(self, workers: Mapping[str, int]) -> float:
        """The steady rate of a setting, by arithmetic."""
        cpu = sum(s.cpu_s for s in self.stages)
        rates = [workers[s.name] / s.service_s(workers[s.name]) for s in self.stages]
        return self.rows_an_item * min(
            [
                *rates,
                self.cores / cpu if cpu else math.inf,
                1 / self.step_s if self.step_s else math.inf,
            ]
        )

    @property
    def best_rows_per_s(self) -> float:
        """The highest steady rate of any setting, if memory is no limit."""
        return self.rows_per_s(
            {
                s.name: max(range(1, s.most + 1), key=lambda n, s=s: n / s.service_s(n))  # type: ignore[misc]
                for s in self.stages
            }
        )


class Script(Policy):
    """A policy that does what its list says, then holds. A step is the workers of `decode`, knobs, or an error."""

    name = "script"

    def __init__(self, *steps: int | Knobs | Exception) -> None:
        self.steps, self.asked = steps, 0

    def initial(self, limits: Limits, knobs: Knobs) -> tuple[Knobs, int]:
        return knobs, 0

    def decide(
        self, snapshot: Snapshot, state: tuple[Knobs, int]
    ) -> tuple[Knobs, tuple[Knobs, int], Reason]:
        self.asked += 1
        knobs, at = state
        step = self.steps[at] if at < len(self.steps) else knobs
        if isinstance(step, Exception):
            raise step
        knobs = knobs.with_workers(decode=step) if isinstance(step, int) else step
        return knobs, (knobs, at + 1), Reason(text=f"number {at}", predicted_rows_per_s=1e9)


def store_bound(wait_s: float = 0.05, **more: Any) -> FakePipeline:
    """A pipeline that waits for a store."""
    read = FakeStage(name="decode", cpu_s=0.002, wait_s=wait_s)
    return FakePipeline([read, FakeStage(name="collate", cpu_s=0.001)], **more)


def look(controller: Controller, pipeline: FakePipeline, times: int) -> None:
    """Lets a controller look so many times, a second of the pipeline apart."""
    for _ in range(times):
        controller.step()
        pipeline.advance(1.0)


def looked(
    pipeline: FakePipeline, policy: str | Policy, times: int, **more: Any
) -> tuple[Controller, list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns a controller that has looked so many times, its events and its metrics."""
    metrics: list[dict[str, Any]] = []
    controller, events = controlled(pipeline, policy, observe=metrics.append, **more)
    look(controller, pipeline, times)
    return controller, events, metrics


def tune(
    pipeline: Tunable, seconds: float, policy: str | Policy = "auto", **more: Any
) -> tuple[Controller, list[dict[str, Any]]]:
    """Has a policy tune a pipeline for so long. Returns its controller, and what it recorded."""
    controller, events = controlled(pipeline, policy, **more)
    go_on(controller, pipeline, seconds)
    return controller, events


def controlled(
    pipeline: Tunable, policy: str | Policy = "auto", **more: Any
) -> tuple[Controller, list[dict[str, Any]]]:
    """Returns a controller by the pipeline's clock, and what it will record."""
    events: list[dict[str, Any]] = []
    policy = make(policy) if isinstance(policy, str) else policy
    how = {"record": events.append, "clock": lambda: pipeline.now, **more}
    return Controller(pipeline, policy, **how), events


def go_on(controller: Controller, pipeline: Tunable, seconds: float) -> None:
    """Looks as often as the policy asks, by the pipeline's clock."""
    until = pipeline.now + seconds
    while pipeline.now < until - 1e-6:
        controller.step()
        pipeline.advance(controller.wait_s)
    assert controller.frozen is None, controller.frozen


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [event for event in events if event["kind"] == kind]
