"""When enough was finished between two looks for their rates to be compared: `enough`. Pure."""

from __future__ import annotations

import math

from sluice.agent.planner_settings import DEFAULT
from sluice.agent.runtime_settings import RUNTIME
from sluice.ingest.stats import Snapshot


def enough(earlier: Snapshot, later: Snapshot) -> bool:
    """Whether every stage that was at work, and the consumer, finished so many items that their number says how fast
    they are. An item under way counts with its elapsed time alone, so that items of seconds are waited for: between two
    looks a second apart most would see none finish, and some as many as there are workers."""
    seconds = later.at - earlier.at
    memory_is_short = later.memory_used > DEFAULT.memory_alarm * later.memory_limit
    if seconds <= 0 or later.cpu_quota != earlier.cpu_quota or memory_is_short:
        return True
    before = {stage.name: stage for stage in earlier.stages}
    work = [(then.busy_s, then.items, now.busy_s, now.items) for now in later.stages
            if (then := before.get(now.name)) is not None]
    work.append((earlier.consumer_compute_s, earlier.batches, later.consumer_compute_s, later.batches))
    return all(_enough(seconds, *counters) for counters in work)


def _enough(seconds: float, busy_s: float, items: int, busy_s_after: float, items_after: int) -> bool:
    """Whether one stage did: the seconds of useful work and the items so far, then and now."""
    busy = (busy_s_after - busy_s) / seconds
    usual_s = busy_s / items if items else math.inf
    return (busy <= RUNTIME.idle or items_after - items >= RUNTIME.least_items * busy or seconds > min(
        RUNTIME.longest_s, RUNTIME.overdue_s + RUNTIME.overdue * RUNTIME.least_items * usual_s))
