"""What is known of remote workers only: how much of a request's time is work. Pure."""

from __future__ import annotations

from dataclasses import replace

from sluice.ingest.knobs import REMOTE
from sluice.ingest.stats import Snapshot


def at_work(seen: Snapshot, before: Snapshot, weighed: Snapshot) -> Snapshot:
    """A snapshot whose time at work elsewhere can be compared between numbers of requests; `weighed` is what this made
    of `before`.

    A request takes as long as the work where workers have room, twice as long where each has two, and as long as
    nobody is there where they start. So that time is scaled to what it would be if each worker had all the requests
    that keep it busy, and only workers that are there had any."""
    a_core = seen.elsewhere.get("requests_a_core", 0)
    stages = (
        {stage.name: stage for stage in seen.stages if stage.backend == REMOTE} if a_core else {}
    )
    earlier = {stage.name: stage for stage in before.stages}
    added = {
        name: stage.busy_s - earlier[name].busy_s
        for name, stage in stages.items()
        if name in earlier
    }
    waited = sum(added.values())
    workers = (seen.elsewhere["workers"] + before.elsewhere.get("workers", 0)) / 2 if a_core else 0
    there = workers / seen.elsewhere.get("ranks", 1) * (seen.at - before.at)
    scale = min(a_core, a_core * there / waited) if waited > 0 else 0.0
    known = {stage.name: stage.busy_s for stage in weighed.stages}
    return replace(
        seen,
        stages=tuple(
            replace(stage, busy_s=known[stage.name] + scale * max(0.0, added[stage.name]))
            if stage.name in added
            else stage
            for stage in seen.stages
        ),
    )
