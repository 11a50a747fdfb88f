"""The numbers behind a decision, for the record of a run: `details`."""

from __future__ import annotations

import math
from typing import Any

from sluice.agent.costs.forecast import Forecast
from sluice.agent.costs.rates import PipelineRates
from sluice.ingest.knobs import Knobs


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
            name: cost.describe(forecast.knobs.workers[name])
            for name, cost in forecast.costs.items()
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
