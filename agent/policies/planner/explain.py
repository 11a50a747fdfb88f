"""The planner's reasons in words and numbers."""

from __future__ import annotations

import math
from typing import Any

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates
from sluice.ingest.knobs import Knobs, format_bytes


def why(bottleneck: str, look: Forecast, since: PipelineRates) -> str:
    """The first half of a sentence: what bounds the rate."""
    if bottleneck == "cores":
        theirs = (look.slow - 1) * since.cpu_quota
        others = f", and other programs would use {theirs:.2g}" if look.slow > look.settings.worth_saying else ""
        return f"the cores are the bottleneck ({since.cpu:.2g} of {since.cpu_quota:.2g} in use{others})"
    if bottleneck == "consumer":
        return f"the trainer is the bottleneck (it waits {since.stall:.1%} of its time)"
    count = look.knobs.workers[bottleneck]
    busy = since.stages[bottleneck].busy if bottleneck in since.stages else 0.0
    waiting = look.services[bottleneck].waiting(count)
    how = f", {waiting:.0%} of that waiting for a store or a lock" if waiting > look.settings.mostly else ""
    return f"{bottleneck} is the bottleneck ({busy:.2g} of {count} worker{'s' * (count > 1)} busy{how})"


def moves(before: Knobs, after: Knobs) -> str:
    """The difference between two settings as text: `read 1 → 4, prefetch 32 MiB → 64 MiB`."""
    found = [f"{name} {count} → {after.workers[name]}" for name, count in before.workers.items()
             if count != after.workers[name]]
    found += [f"{name} {before.backend.get(name, 'thread')} → {backend}" for name, backend in after.backend.items()
              if backend != before.backend.get(name, "thread")]
    found += [f"{name} fused" for name in sorted(after.fused - before.fused)]
    found += [f"{name} split" for name in sorted(before.fused - after.fused)]
    found += [f"{label} {format_bytes(old)} → {format_bytes(new)}" for label, old, new in (
        ("read-ahead", before.read_ahead_bytes, after.read_ahead_bytes),
        ("prefetch", before.prefetch_bytes, after.prefetch_bytes)) if old != new]
    return ", ".join(found)


def details(look: Forecast, since: PipelineRates, knobs: Knobs, rate: float) -> dict[str, Any]:
    """The numbers behind a decision, stage models among them."""
    return {"stall": since.stall, "now_rows_per_s": _finite(look.rate(look.knobs.workers)),
            "best_rows_per_s": _finite(rate), "cores_rows_per_s": _finite(look.cores_rate(look.knobs.workers)),
            "demand_rows_per_s": _finite(look.demand), "memory_bytes": look.memory(knobs),
            "memory_limit": look.memory_limit, "core_slowdown": look.slow,
            "stages": {name: service.describe(look.knobs.workers[name]) for name, service in look.services.items()}}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
