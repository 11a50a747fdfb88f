"""What bounded a run's rate, and the rate that other costs of its stages would bring: `Bounds`. Pure.

The model is that of `sluice headroom`: a pipeline is as fast as its narrowest stage, its cores and its trainer allow.
Beside that, a stage that waits for a lock or a core waits for the others, and so less where these do less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sluice.agent.report.run_folder import Run
from sluice.ingest.stage_spec import ONLINE

_SETTLED = 1 / 3
"""The share of a run's looks, at its end, that counts as settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBound:
    """One stage, as it was at the end of a run."""

    workers: float
    cpu_s: float
    """Processor seconds a row."""
    wait_s: float = 0.0
    """Seconds a row that a worker at work waits for a lock, a core or a store."""
    core_wait_s: float = 0.0
    """Those of them in which it was ready to run and had no core; 0 if that was not recorded."""

    @property
    def busy_s(self) -> float:
        return self.cpu_s + self.wait_s

    def beside(self, before: StageBound, others_s: tuple[float, float]) -> StageBound:
        """The stage with its waits, when it was as `before` and threads beside one of its workers took so many
        processor seconds a row then, and do so now. While it does a row, at most what those take for one can be in its
        way. Where it had no core beyond that, other programs had it, so that each second of work takes longer; the rest
        is a store's."""
        then, now = others_s
        way = min(before.wait_s, then * before.workers)
        programs = min(before.wait_s - way, before.core_wait_s)
        return replace(self, wait_s=(way * now / then if then > 0 else 0.0)
                       + (programs * self.cpu_s / before.cpu_s if before.cpu_s > 0 else 0.0)
                       + before.wait_s - way - programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """All that bounds a rate."""

    stages: Mapping[str, StageBound]
    head: Mapping[str, str]
    """The stage whose workers do the work of a stage that is fused with it."""
    other_cpu_s: float
    """Processor seconds a row that no stage accounts for: those of the trainer."""
    cores: float
    demand: float
    """Rows a second that the trainer takes if it never waits."""
    measured: float
    """Rows a second that the run had."""

    @classmethod
    def of(cls, run: Run) -> Bounds | None:
        """The bounds at a run's end, under its last knobs; None if it did not last long enough to have any."""
        looks = [look for look in run.of("loader") if look.get("rows_per_s") and look.get("stages")]
        looks = [look for look in looks if look["knobs"] == looks[-1]["knobs"]]
        looks = looks[-max(1, round(_SETTLED * len(looks))):]
        rows = sum(look["rows_per_s"] for look in looks)
        if not rows:
            return None
        last = looks[-1]
        def total(name: str, what: str) -> float:
            return sum(look["stages"].get(name, {}).get(what) or 0.0 for look in looks)

        def each(name: str, what: str) -> float:  # of the rows that the stage itself passed on meanwhile
            return total(name, what) / (total(name, "rows_per_s") or rows)

        stages = {name: StageBound(workers=stage["workers"], cpu_s=each(name, "cpu"),
                                   core_wait_s=each(name, "core_wait"),
                                   wait_s=max(0.0, each(name, "busy") - each(name, "cpu")))
                  for name, stage in last["stages"].items()}
        names = list(stages)
        head: dict[str, str] = {}
        for number, name in enumerate(names):
            head[name] = head[names[number - 1]] if number and name in last["knobs"].get("fused", ()) else name
        takes_s = sum(look["rows_per_s"] / look["demand_rows_per_s"] for look in looks
                      if look.get("demand_rows_per_s")) / rows
        others = sum(look.get("cpu") or 0.0 for look in looks) - sum(total(name, "cpu") for name in stages)
        return cls(stages=stages, head=head, cores=last["cpu_quota"], measured=rows / len(looks),
                   other_cpu_s=max(0.0, others / rows),
                   demand=1 / takes_s if takes_s > 0 else math.inf)

    @property
    def cpu_s(self) -> float:
        """Processor seconds a row of everything together."""
        return self.other_cpu_s + sum(stage.cpu_s for stage in self.stages.values())

    def then(self, more_s: Mapping[str, float], *, without: str = "") -> Bounds:
        """The bounds if each of these stages took so much more of a processor for a row, and one were not there at all,
        with its copies and hand-overs. A stage that is new has one worker. What a stage waited for others changes with
        what these take."""
        known = {**{name: StageBound(workers=1, cpu_s=0.0) for name in more_s}, **self.stages}
        stages = {name: replace(stage, cpu_s=max(0.0, stage.cpu_s + more_s.get(name, 0.0)))
                  for name, stage in known.items() if name != without}
        now, after = self.cpu_s, self.other_cpu_s + sum(stage.cpu_s for stage in stages.values())
        for name, stage in stages.items():
            before = known[name]
            stages[name] = stage.beside(before, (now - before.cpu_s / max(1.0, before.workers),
                                                 after - stage.cpu_s / max(1.0, stage.workers)))
        return replace(self, stages=stages, head={name: name for name in stages} | dict(self.head))

    @property
    def capacity(self) -> float:
        """The rows a second that all of this allows."""
        busy: dict[str, float] = {}
        for name, stage in self.stages.items():
            busy[self.head[name]] = busy.get(self.head[name], 0.0) + stage.busy_s
        rates = [self.stages[name].workers / seconds for name, seconds in busy.items()
                 if seconds > 1e-12 and name in self.stages]
        return min([self.demand, *rates, *([self.cores / self.cpu_s] if self.cpu_s > 1e-12 and self.cores else [])])

    def rate(self, then: Bounds) -> float:
        """The rows a second of other bounds, as this run's own were: what the model leaves out, it leaves out of
        both."""
        capacity = self.capacity
        return min(then.demand, self.measured * then.capacity / capacity) if math.isfinite(capacity) else self.measured

    @property
    def applies_in_batches(self) -> str:
        """The stage that applies operators to batches; empty if the run had none."""
        return next((name for name in self.stages if name.startswith(ONLINE)), "")
