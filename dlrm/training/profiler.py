"""Traces a few steps, for chrome://tracing or Perfetto. The wait for the loader appears as `## next_batch ##`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FIRST = 10  # earlier steps belong to the start


@contextmanager
def traced(steps: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Gives a function to be called after each step; the trace of `steps` steps becomes trace.json. 0: no trace."""
    if not steps:
        yield lambda: None
        return
    from torch.profiler import profile, schedule

    with profile(
        schedule=schedule(wait=FIRST - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(folder / "trace.json")),
    ) as profiler:
        yield profiler.step
