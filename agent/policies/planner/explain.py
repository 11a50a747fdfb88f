"""Describes the planner's reasons in text and numbers."""

from __future__ import annotations

import math
from typing import Any

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates
from sluice.agent.report import format as text
from sluice.ingest.knobs import Knobs


def why(bottleneck: str, forecast: Forecast, recent: PipelineRates) -> str:
    """Returns the first half of a sentence: the bottleneck and its use."""
    if bottleneck == "cores":
        theirs = (forecast.slow - 1) * recent.cpu_quota
        mentioned = forecast.slow > forecast.settings.headroom_ratio
        others = f", and other programs want {theirs:.2g}" if mentioned else ""
        return f"the cores are the bottleneck ({recent.cpu:.2g} of {recent.cpu_quota:.2g} in use{others})"
    if bottleneck == "consumer":
        return f"the trainer is the bottleneck (it waits {100 * recent.stall:.1f} % of its time)"
    count = forecast.knobs.workers[bottleneck]
    busy = recent.stages[bottleneck].busy if bottleneck in recent.stages else 0.0
    waiting = forecast.costs[bottleneck].waiting(count)
    how = (
        f", {100 * waiting:.0f} % of that waiting for a store or a lock"
        if waiting > forecast.settings.mostly_share
        else ""
    )
    return f"{bottleneck} is the bottleneck ({busy:.2g} of {count} worker{'s' * (count > 1)} busy{how})"


def moves(before: Knobs, after: Knobs) -> str:
    """Returns the difference between two settings as text: `decode 1 → 4, prefetch 32 MiB → 64 MiB`."""
    return text.moves(before.to_dict(), after.to_dict())


def details(forecast: Forecast, recent: PipelineRates, knobs: Knobs, rate: float) -> dict[str, Any]:
    """The numbers behind a decision, stage models among them."""
    return {
        "stall": recent.stall,
        "now_rows_per_s": _finite(forecast.rate(forecast.knobs.workers)),
        "best_rows_per_s": _finite(rate),
        "cores_rows_per_s": _finite(forecast.cores_rate(forecast.knobs.workers)),
        "demand_rows_per_s": _finite(forecast.demand),
        "memory_bytes": forecast.memory(knobs),
        "memory_limit": forecast.memory_limit,
        "core_slowdown": forecast.slow,
        **(
            {
                "cores_elsewhere": forecast.remote_cores(knobs.workers),
                "price_rows_per_s": forecast.price(knobs.workers),
            }
            if forecast.remote_stages
            else {}
        ),
        "stages": {
            name: service.describe(forecast.knobs.workers[name])
            for name, service in forecast.costs.items()
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
