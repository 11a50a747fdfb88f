"""How far Spark is with a stage of a job, in words: `tasks_of`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def tasks_of(spark: Any) -> Callable[[], str]:
    """Returns what counts the tasks of this session's active stages."""
    tracker = spark.sparkContext.statusTracker()

    def so_far() -> str:
        try:
            stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        except Exception:  # the session may be ending just now: a progress line is not worth a failure
            return "…"
        done = sum(s.numCompletedTasks for s in stages if s)
        return f"{done}/{sum(s.numTasks for s in stages if s)} tasks" if stages else "…"
    return so_far
