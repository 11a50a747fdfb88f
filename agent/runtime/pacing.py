"""When enough was finished between two looks for their rates to be compared: `enough`. Pure."""

from __future__ import annotations

from sluice.ingest.stats import Snapshot

_LEAST_ITEMS = 2  # finished by each busy worker, on average: of fewer, most of the work may lie outside the interval
_IDLE = 0.05  # workers busy on average: below this, nobody waits for what a stage does
_ALARM = 0.95  # of the memory in use: then nothing is waited for


def enough(earlier: Snapshot, later: Snapshot) -> bool:
    """Whether every stage that was at work, and the consumer, finished so many items that their number says how fast
    they are. An item under way counts with its elapsed time alone, so that items of seconds are waited for: between two
    looks a second apart most would see none finish, and some as many as there are workers."""
    seconds = later.at - earlier.at
    if seconds <= 0 or later.cpu_quota != earlier.cpu_quota or later.memory_used > _ALARM * later.memory_limit:
        return True
    before = {stage.name: stage for stage in earlier.stages}
    work = [(now.busy_s - then.busy_s, now.items - then.items) for now in later.stages
            if (then := before.get(now.name)) is not None]
    work.append((later.consumer_compute_s - earlier.consumer_compute_s, later.batches - earlier.batches))
    return all(busy_s <= _IDLE * seconds or items >= _LEAST_ITEMS * busy_s / seconds for busy_s, items in work)
