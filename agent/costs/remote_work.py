"""Measures how much of a remote request's time is work: `at_work`. Pure."""

from __future__ import annotations

import math
from dataclasses import replace

from sluice.ingest.knobs import REMOTE
from sluice.ingest.stats import Snapshot


def at_work(seen: Snapshot, before: Snapshot, weighed: Snapshot) -> Snapshot:
    """Returns the snapshot with comparable busy times of remote workers. `weighed` is the result for `before`.

    An idle worker answers in the time that the work takes. A worker with two requests takes twice as long, and a
    starting worker does not answer. So busy time is scaled as if each running worker had exactly the requests that keep
    it busy. The requests of workers that have not started count as `starting`."""
    requests_a_core = seen.elsewhere.get("requests_a_core", 0)
    stages = (
        {stage.name: stage for stage in seen.stages if stage.backend == REMOTE}
        if requests_a_core
        else {}
    )
    earlier = {stage.name: stage for stage in before.stages}
    added = {
        name: stage.busy_s - earlier[name].busy_s
        for name, stage in stages.items()
        if name in earlier
    }
    requested_s = sum(added.values())
    workers = (
        (seen.elsewhere["workers"] + before.elsewhere.get("workers", 0)) / 2
        if requests_a_core
        else 0
    )
    worker_s = workers / seen.elsewhere.get("ranks", 1) * (seen.at - before.at)
    scale = (
        min(requests_a_core, requests_a_core * worker_s / requested_s) if requested_s > 0 else 0.0
    )
    known = {
        stage.name: stage.busy_s + scale * max(0.0, added.get(stage.name, 0.0))
        for stage in weighed.stages
    }
    waiting = math.ceil(requests_a_core * seen.elsewhere.get("starting", 0))
    return replace(
        seen,
        stages=tuple(
            replace(
                stage,
                busy_s=known[stage.name],
                finished_s=known[stage.name],
                starting=min(waiting, stage.workers),
            )
            if stage.name in added
            else stage
            for stage in seen.stages
        ),
    )
