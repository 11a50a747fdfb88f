"""When enough was finished between two looks for their rates to be compared: `enough`. Pure."""

from __future__ import annotations

import math

from sluice.ingest.stats import Snapshot

_LEAST_ITEMS = 2  # finished by each busy worker, on average: of fewer, much of the work may lie outside the interval
_IDLE = 0.05  # workers busy on average: below this, nobody waits for what a stage does
_ALARM = 0.95  # of the memory in use: then nothing is waited for
_OVERDUE, _OVERDUE_S = 4, 5.0  # times what was expected, and seconds more: whoever takes longer is not waited for,
_LONGEST_S = 30.0  # nor is anybody for longer than this: something may hang


def enough(earlier: Snapshot, later: Snapshot) -> bool:
    """Whether every stage that was at work, and the consumer, finished so many items that their number says how fast
    they are. An item under way counts with its elapsed time alone, so that items of seconds are waited for: between two
    looks a second apart most would see none finish, and some as many as there are workers."""
    seconds = later.at - earlier.at
    if seconds <= 0 or later.cpu_quota != earlier.cpu_quota or later.memory_used > _ALARM * later.memory_limit:
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
    return (busy <= _IDLE or items_after - items >= _LEAST_ITEMS * busy
            or seconds > min(_LONGEST_S, _OVERDUE_S + _OVERDUE * _LEAST_ITEMS * usual_s))
