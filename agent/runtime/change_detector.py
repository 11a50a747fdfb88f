"""Notices changes that no decision caused: `ChangeDetector`.

These are changes of the cores, the memory limit, the worker processes, or the cost of a row.
"""

from __future__ import annotations

from typing import Any

from sluice.agent.costs.rates import PipelineRates
from sluice.agent.costs.stage_cost import StageCost
from sluice.agent.planner_settings import DEFAULT
from sluice.agent.runtime_settings import RUNTIME
from sluice.ingest.knobs import format_bytes
from sluice.ingest.stats import Snapshot


class ChangeDetector:
    """Compares each snapshot with the last one. `look` returns the events."""

    def __init__(self) -> None:
        self._costs: dict[str, StageCost] = {}
        self._last: Snapshot | None = None
        self._looks_since_knobs_changed = 0
        # The restart count when the unreported restarts began. None: all are reported.
        self._reported_restarts: int | None = None

    def look(self, snapshot: Snapshot, rates: PipelineRates | None) -> list[dict[str, Any]]:
        """Returns an event for each change since the last snapshot. `rates` are the rates since then."""
        before = self._last
        self._last = snapshot
        if before is None:
            self._costs = {
                stage.name: StageCost(name=stage.name).observe(stage, False)
                for stage in snapshot.stages
            }
        if before is None or rates is None:
            return []
        events = []
        if snapshot.cpu_quota != before.cpu_quota:
            events.append(
                _event(
                    "cores",
                    f"the cores at hand went from {before.cpu_quota:.3g} to "
                    f"{snapshot.cpu_quota:.3g}",
                )
            )
        if abs(snapshot.memory_limit / before.memory_limit - 1) > RUNTIME.limit_change_share:
            events.append(
                _event(
                    "memory",
                    f"the memory limit went from {format_bytes(before.memory_limit)} to "
                    f"{format_bytes(snapshot.memory_limit)}",
                )
            )
        if self._reported_restarts is not None:
            died = snapshot.restarts - self._reported_restarts
            self._reported_restarts = None
            events.append(
                _event(
                    "worker",
                    "a worker process died and was replaced"
                    if died == 1
                    else f"{died} worker processes died and were replaced",
                )
            )
        elif snapshot.restarts > before.restarts:
            # The event follows at the next look, when all ranks have counted their own restarts.
            self._reported_restarts = before.restarts
        knobs_changed = any(
            s.workers != before.stage(s.name).workers or s.backend != before.stage(s.name).backend
            for s in snapshot.stages
            if s.name in rates.stages
        )
        self._looks_since_knobs_changed = (
            0 if knobs_changed else self._looks_since_knobs_changed + 1
        )
        return events + self._find_cost_changes(snapshot, rates)

    def _find_cost_changes(self, snapshot: Snapshot, rates: PipelineRates) -> list[dict[str, Any]]:
        """Returns an event for each busy stage whose rows became dearer or cheaper by themselves."""
        events = []
        for stage in snapshot.stages:
            before = self._costs.get(stage.name, StageCost(name=stage.name))
            after = self._costs[stage.name] = before.observe(stage, rates.saturated())
            busy = rates.stages[stage.name].busy if stage.name in rates.stages else 0.0
            is_busy = busy >= DEFAULT.min_busy_share * stage.workers
            # Soon after a change of knobs, only a large change of cost has another cause.
            by_itself = (
                self._looks_since_knobs_changed > RUNTIME.own_effect_looks
                or after.leaps > before.leaps
            )
            if after.drifts > before.drifts and by_itself and is_busy:
                times = after.busy_s(stage.workers) / before.busy_s(stage.workers)
                change = (
                    f"{times:.2g} times dearer" if times > 1 else f"{1 / times:.2g} times cheaper"
                )
                events.append(_event("workload", f"a row became {change} in {stage.name}"))
        return events


def _event(what: str, text: str) -> dict[str, Any]:
    return {"kind": "occasion", "what": what, "text": text}
