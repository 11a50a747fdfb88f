"""What a pipeline would do with other means, from its stage models: `what_if`. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from agent.outlook import Outlook


def what_if(look: Outlook) -> dict[str, Any]:
    """Rows a second now, and expected with half and twice the cores, twice the memory, and a trainer that only takes.

    A case is left out where nothing tells what it would change (no limit on cores, nothing known of the demand)."""
    ranges = look.limits.workers

    def best(case: Outlook) -> tuple[float, dict[str, int]]:
        knobs, rate = case.best({name: ranges[name] for name in case.services}, fewest=True)
        return min(rate, case.demand), dict(knobs.workers)

    cases = {"as it is": look, "twice the memory": replace(look, memory_limit=2 * look.memory_limit)}
    if look.cores > 0:
        cases |= {f"{name} the cores": replace(look, cores=factor * look.cores, stage_cores=factor * look.stage_cores)
                  for name, factor in (("half", 0.5), ("twice", 2.0))}
    if math.isfinite(look.demand):
        cases["a trainer that only takes"] = replace(look, demand=math.inf)
    found = {}
    for name, case in cases.items():
        rate, workers = best(case)
        if math.isfinite(rate):
            found[name] = {"rows_per_s": rate, "workers": workers}
    return found
