"""Lets a `Scheduler` into the loader: `storm` puts its threads and clock where modules have `threading` and `time`.

Nothing of the product changes for that, and no module can be forgotten: every loaded module of the room is looked
through, for the names and for defaults of functions. The world is made small as well: what counts in MiB counts in
hundreds of bytes, so that tables of a few rows meet every bound that large ones do.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from sluice.etl.table import commit
from sluice.ingest.flow import series
from sluice.ingest.memory.governor import Charge
from tests.product import Governor, Limits, TableStore
from tests.storm import steps, store
from tests.storm.children import StormChild
from tests.storm.scheduler import Crew
from tests.storm.threads import Names, Threading, Time

_NO_PROBE = SimpleNamespace(enter=lambda _: None, leave=lambda _: None, held_s=0.0)
# What a module does with the machine that has no place in a run of one seed, and what is too large for it.
_INSTEAD = {
    "sluice.ingest.loader_input": {"RowGroupReader": store.MemoryGroups},
    "sluice.ingest.read.reader": {"KeptFiles": store.MemoryFiles},
    "sluice.ingest.process.worker": {
        "Child": StormChild,
        "anonymous_bytes": lambda _pid: 0,
        "core_seconds": lambda _pid: (0.0, 0.0),
    },
    # No collector comes in the middle of a run, and a thread that the run does not know would take another's turn.
    "sluice.common.dropped": {
        "_thread": SimpleNamespace(start_new_thread=lambda call, _: call()),
        "threading": SimpleNamespace(Thread=lambda target, **_: SimpleNamespace(start=target)),
    },
    "sluice.ingest.stages.counters": {"core_wait_s": lambda: 0.0},
    "sluice.ingest.progress": {"PROBE": _NO_PROBE},
    "sluice.ingest.pipeline": {
        "PROBE": _NO_PROBE,
        "WORKER_PROCESS_BYTES": 300,
        "warn": lambda _: None,
        "Limits": functools.partial(Limits, read_ahead_bytes=(1, 2**40), prefetch_bytes=(1, 2**40)),
    },
    "sluice.ingest.memory.process_memory": {"give_back": lambda: None},
    "sluice.ingest.stages.transform_worker": {
        "WORKER_PROCESS_BYTES": 300,
        # Torch has one thread here. A thread that is passed over in a real lock would stop the others for ever.
        "_TORCH_THREADS": contextlib.nullcontext(),
    },
    "sluice.ingest.process.protocol": {"_GRAIN": 64},
    "sluice.etl.table.commit": {
        "DeltaTable": steps.StepTable,
        "create_table_with_add_actions": steps.step("create", commit.create_table_with_add_actions),
    },
    "deltalake": {"DeltaTable": steps.StepTable},
}
FOOTPRINT = {
    **dict.fromkeys(("_KEPT", "_ORDERS", "_PLACES", "SCRATCH_OF_A_ROW", "UNPACKED_OF_A_ROW"), 0),
    "_KEPT_PART": 2**60,
}
"""What is much more than all that a storm has: it is not charged for, either."""
_INSTEAD["sluice.ingest.stages.minimum_memory"] = FOOTPRINT
_CLOCKS = {time.monotonic: Time.monotonic, time.thread_time: Time.monotonic, time.time: Time.time}

_UNDER_NAMES = (
    threading.Lock,
    threading.RLock,
    threading.Thread,
    threading.Condition,
    threading.Event,
)


BY_LINES = tuple(
    f"/ingest/{name}.py"
    for name in (
        "flow/decoded",
        "flow/placer",
        "flow/series",
        "loader",
        "memory/governor",
        "pipeline",
        "process/child",
        "process/shared_memory",
        "process/worker",
        "read/kept_files",
        "read/reader",
        "read/retry",
        "stages/batch",
        "stages/batch_functions",
        "stages/counters",
        "stages/cutter",
        "stages/pool",
        "stages/quarantine",
        "stages/transform",
        "stages/transform_worker",
        "stages/transformer",
    )
)


def by_lines(file: str) -> bool:
    """Whether a source file's lines count, in runs that go by lines: those of code that threads share. Not `buffers`:
    who looks at a frame's names holds what they name, and buffers go by who holds what. Nor what remembers results."""
    return file.endswith(BY_LINES)


@contextmanager
def storm() -> Iterator[Crew]:
    """While it lasts the modules of loader and table run under the current `Scheduler` alone."""
    undo: list[Callable[[], None]] = []
    crew = Crew()
    automatic = gc.isenabled()
    torch_threads = torch.get_num_threads()
    try:  # also what could not be entered is left as it was
        for name, module in sorted(sys.modules.items()):
            if name.startswith(("sluice.ingest.", "sluice.etl.")):
                _enter(module, undo)
        for name, changes in _INSTEAD.items():
            for attribute, value in changes.items():
                _set(sys.modules[name], attribute, value, undo)
        _set(Governor, "move", _watched(Governor.move), undo)
        _set(series, "SERIES_ROWS", series.SERIES_ROWS, undo)  # each seed has its own
        for method in steps.OF_STORE:
            _set(TableStore, method, steps.step(method, getattr(TableStore, method)), undo)
        torch.set_num_threads(
            1
        )  # a transform's thread would set it otherwise, under a lock that is none of the run's
        gc.disable()  # it would run in the middle of a run, at another place each time
        yield crew
    finally:
        for close in reversed(undo):
            close()
        crew.close()
        torch.set_num_threads(torch_threads)
        if automatic:
            gc.enable()


def _watched(
    move: Callable[[Governor, Charge, int], None],
) -> Callable[[Governor, Charge, int], None]:
    """Remembers the most that was charged at a time."""

    def moved(governor: Governor, charge: Charge, size: int) -> None:
        move(governor, charge, size)
        governor.peak = max(getattr(governor, "peak", 0), governor.charged)  # type: ignore[attr-defined]

    return moved


def _enter(module: Any, undo: list[Callable[[], None]]) -> None:
    for attribute, mine in (("threading", Threading), ("time", Time), ("uuid", Names)):
        if getattr(module, attribute, None) in (threading, time, uuid):
            _set(module, attribute, mine, undo)
    for attribute, value in vars(module).items():
        assert not any(value is real for real in _UNDER_NAMES), (
            f"{module.__name__} takes {attribute} out of threading: import the module"
        )
    functions = [
        f
        for f in vars(module).values()
        if callable(f) and getattr(f, "__module__", "") == module.__name__
    ]
    for function in functions:
        for owner in (function, *(vars(function).values() if isinstance(function, type) else ())):
            for kind in ("__defaults__", "__kwdefaults__"):
                _defaults(owner, kind, undo)


def _defaults(function: Any, kind: str, undo: list[Callable[[], None]]) -> None:
    """Clocks that are a function's default."""
    given = getattr(function, kind, None)
    if not isinstance(given, (tuple, dict)):
        return
    values = given.values() if isinstance(given, dict) else given
    if not any(_clock(value) for value in values):
        return
    mine = (
        {n: _clock(v) or v for n, v in given.items()}
        if isinstance(given, dict)
        else tuple(_clock(v) or v for v in given)
    )
    _set(function, kind, mine, undo)


def _clock(value: Any) -> Any:
    return next((mine for real, mine in _CLOCKS.items() if value is real), None)


def _set(owner: Any, attribute: str, value: Any, undo: list[Callable[[], None]]) -> None:
    before = getattr(owner, attribute)
    undo.append(lambda: setattr(owner, attribute, before))
    setattr(owner, attribute, value)


def chance_of(seed: int) -> random.Random:
    """All that one run leaves to chance."""
    return random.Random(f"storm/{seed}")
