"""Loaders that come and go in one process leave no open file, no thread and no process, closed or not."""

import gc
import os
import threading
from collections import Counter

import psutil
import pytest

from sluice import Knobs, Transform
from tests.ingest.twin import eventually
from tests.open_loader import open_loader
from tests.product import PlanError
from tests.run_program import run_program

ROUNDS = 12


def is_open() -> Counter[str]:
    """What this process has open, by where it leads."""
    opened: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            opened[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
        except FileNotFoundError:  # the listing itself
            continue
    return opened


def closed(uri: str, **how) -> None:
    with open_loader(uri, batch_size=160, **how) as loader:
        for _ in loader:
            pass


def left_in_the_middle(uri: str, **how) -> None:
    with open_loader(uri, batch_size=160, **how) as loader:
        next(iter(loader))


def dropped(uri: str, **how) -> None:
    for _ in open_loader(uri, batch_size=160, **how):
        pass


def dropped_in_the_middle(uri: str, **how) -> None:
    next(iter(open_loader(uri, batch_size=160, **how)))


def never_used(uri: str, **how) -> None:
    open_loader(uri, batch_size=160, **how)


def refused(uri: str, **how) -> None:
    with pytest.raises(PlanError):
        open_loader(uri, batch_size=0, **how)


@pytest.mark.parametrize(
    "use", [closed, left_in_the_middle, dropped, dropped_in_the_middle, never_used, refused]
)
@pytest.mark.parametrize("kind", ["arrow", "petastorm", "processes"])
def test_nothing_stays_open_of_many_loaders_without_help_of_the_garbage_collector(table, use, kind):
    """Cycles of garbage hold files open until the collector comes, which may be hundreds of files later."""
    how = {"reader": "petastorm" if kind == "petastorm" else "arrow"}
    if kind == "processes":
        how |= {
            "fill": 0.0,
            "transforms": [Transform("tests.ingest.remote.functions:halved", "mine")],
            "knobs": Knobs(backend={"mine": "process"}),
        }
    use(table.uri, **how)  # imports, compiles and opens what stays
    gc.collect()
    before, threads = is_open(), set(threading.enumerate())
    gc.disable()
    try:
        for _ in range(3 if kind == "processes" else ROUNDS):
            use(table.uri, **how)
            eventually(lambda: set(threading.enumerate()) <= threads)
        eventually(lambda: all(name.startswith("/proc/") for name in is_open() - before))
    finally:
        gc.enable()


ALIVE_AT_EXIT = """
import os, sys
import sluice
from sluice.ingest.knobs import Knobs
from sluice.ingest.stages.transform import Transform
from tests.open_loader import open_loader
transform = Transform("tests.ingest.remote.functions:halved", "mine")
knobs = Knobs(backend={"mine": "process"})
for keeper in (os, sluice):  # a module is emptied when others are empty already
    loader = open_loader(sys.argv[1], batch_size=160, fill=0.0, transforms=[transform], knobs=knobs)
    keeper.epoch = iter(loader)
    next(keeper.epoch)
    print(*loader.pipeline.worker_pids)
"""


def test_an_epoch_that_is_alive_when_the_interpreter_exits_leaves_no_word_and_no_process(table):
    done = run_program("-c", ALIVE_AT_EXIT, table.uri, check=True)
    assert done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    assert not any(map(psutil.pid_exists, pids))
