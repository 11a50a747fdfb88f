"""Storms: some seeds without a deviation, each the same whenever it is run; and that storms find what is
wrong: every mutant below is found, those of mistakes that were there once included."""

import dataclasses
import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sluice.etl.table import commit
from sluice.ingest import loader
from sluice.ingest.memory import buffers, governor
from sluice.ingest.process import worker
from sluice.ingest.stages import batch, pool
from sluice.ingest.stages.counters import StageCounters
from tests.changed_function import changed
from tests.run_program import run_program
from tests.storm.doors import BY_LINES, by_lines, chance_of, storm
from tests.storm.loading import run_loader
from tests.storm.pools import run_pools
from tests.storm.runs import run_seed, some_seeds
from tests.storm.scheduler import Deadlock, Scheduler, Way
from tests.storm.tables import run_table
from tests.storm.threads import Lock, Thread, Time, entered

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def nothing_of_others_ends_within_a_storm() -> None:
    """A loader that an earlier test let go of would be closed in the middle of a run, which knows nothing of it."""
    gc.collect()


def test_files_whose_lines_count_are_there():
    root = Path(__file__).parents[2]
    assert all((root / file[1:]).is_file() for file in BY_LINES)


def test_no_module_whose_lines_count_has_a_real_lock():
    """A thread that is passed over while it holds one would stop the others, and the run would not know of it."""
    real = type(threading.Lock()), type(threading.RLock())
    with storm():
        modules = [
            module for module in sys.modules.values() if by_lines(str(vars(module).get("__file__")))
        ]
        held = [value for module in modules for value in vars(module).values()]
    assert len(modules) == len(BY_LINES)
    assert not any(isinstance(value, real) for value in held)


def test_seeds_deviate_in_nothing():
    total, findings = some_seeds(range(60))
    assert not findings, findings[0].text
    assert total.deviations == 0
    assert min(total.kills, total.resizes, total.stalls, total.errors, total.resumes) > 0


def test_tables_deviate_in_nothing():
    total, findings = some_seeds(range(25), tables=True)
    assert not findings, findings[0].text
    assert min(total.kills, total.errors, total.conflicts) > 0


def test_a_seed_is_the_same_run_in_every_process():
    """Whatever ran before it, and however names are hashed; and its replay shows it to a person."""
    with storm() as crew:
        here = [run_seed(seed, crew).digest() for seed in (3, 14, 15)][-1]
    other = run_program(
        "-m", "tests.storm", "--seed", "15", check=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert json.loads(other.stdout)["trace"] == here
    assert "no deviation" in other.stderr
    assert "0 main: releases (RLock of stage_pools.py" in other.stderr


def test_two_threads_that_wait_for_each_other_are_named():
    with storm() as crew, entered(Scheduler(chance_of(0), Way(switch=0.9), crew)) as run:
        first, second = Lock(), Lock()

        def other():
            with second:
                Time.sleep(1)
                with first:
                    pass

        Thread(target=other, name="other").start()
        first.acquire()
        Time.sleep(1)
        with pytest.raises(
            Deadlock,
            match=r"(?s)0 main: waits for .*Lock 2.*, which 1 other holds.*1 other: waits for "
            r".*Lock 1.*, which 0 main holds",
        ):
            second.acquire()
        assert run.now >= 1, "its own clock went on, and nobody slept"


def test_counters_that_several_threads_change_never_fall_and_add_up():
    """A pipeline reads the counters of a stage whose pool is made at that moment."""
    for seed in range(8):
        way = Way(switch=0.5, tick_s=0.01, lines=0.5)
        with storm() as crew, entered(Scheduler(chance_of(seed), way, crew, by_lines)) as run:
            counters, began = StageCounters("decode", Time.monotonic), run.now
            counters.change(waiting=1)

            def look(counters=counters):
                for _ in range(10):
                    Time.sleep(0.1)
                    before = counters.wait_input_s
                    counters.change()
                    assert counters.wait_input_s >= before

            threads = [Thread(target=look, name=f"look {number}") for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            counters.change(waiting=-1)
            assert counters.wait_input_s == pytest.approx(run.now - began)
            assert began < run.now
            run.finish()


# ---- what a storm finds


def closed(case):
    """Somebody closes it while it is in use."""
    return dataclasses.replace(case, close_at=0.3, turns=0)


def tight(chain):
    """Hardly any room for early work."""
    return dataclasses.replace(chain, room=3)


def by_processes(case):
    return dataclasses.replace(
        case, transforms=case.transforms or ("raised",), apart=True, limit=10**9, kill=0.1, deaths=2
    )


def two_jobs(plans):
    """At the same time."""
    return dataclasses.replace(plans, jobs=("overwrite", "update"), full=0.0, kills=0)


def same(case):
    return case


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake in one method: what stands there, and what stands there with the mistake."""

    kind: Any
    seeds: int
    owner: Any
    method: str
    old: str
    new: str
    bend: Any = same
    first: int = 0
    """The seed with which looking begins: a rare one is found not long after it."""


MUTANTS = {
    "nobody hears that a result was taken": Mutant(
        run_pools, 100, pool.Pool, "__next__", "self._room.notify_all()", "pass"
    ),
    "a charge is given back twice": Mutant(
        run_pools,
        100,
        governor.Charge,
        "release",
        "self._governor.move(self, 0)",
        "self._governor._charged -= 1; self._governor.move(self, 0)",
    ),
    "early work is let in though there is no room": Mutant(
        run_pools, 100, governor.Governor, "admit", "(tight or", "(False or", tight
    ),
    "the item of a killed process is lost": Mutant(
        run_loader,
        100,
        worker.WorkerProcess,
        "call",
        "if self._closed:",
        """return {}
            if self._closed:""",
        by_processes,
    ),
    "what a killed process left half done is handed on": Mutant(
        run_loader,
        300,
        worker.WorkerProcess,
        "_attempt",
        "reply = child.receive(self.limit_s)",
        """try:
        reply = child.receive(self.limit_s)
    except Died:
        self._forget()
        return protocol.read(region.bytes(), [layout._at, layout.size])[0]""",
        by_processes,
    ),
    "memory that a user still looks at is written again": Mutant(
        run_loader, 100, buffers.Buffers, "take", "if not memory.is_used():", "if True:"
    ),
    "ranks that share a stream take the same part": Mutant(
        run_loader,
        100,
        batch.Finisher,
        "_part_of",
        "own, columns = self._share.bounds",
        "own, columns = slice(0, self._share.rows)",
    ),
    "a commit that was overtaken is made on what is there then": Mutant(
        run_table, 100, commit, "_commit", "max_commit_retries=0", "max_commit_retries=15", two_jobs
    ),
    # What was there, and was found so.
    "a loader that is closed says that its store was closed": Mutant(
        run_loader,
        1000,
        loader.BatchLoader,
        "_epoch",
        "(Closed, SourceError)",
        "Closed",
        closed,
        first=151,  # a run with processes that is broken off leaves shared memory
    ),
}


def first_failure(mutant, seeds):
    """The first seed whose run raises something, and what."""
    with storm() as crew:
        for seed in seeds:
            try:
                mutant.kind(chance_of(seed), crew, by_lines, mutant.bend)
            except (Exception, Deadlock) as error:
                return seed, error
    return None, None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name):
    """By a seed that finds nothing in the code as it is."""
    mutant = MUTANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        mistaken = changed(mutant.owner, mutant.method, mutant.old, mutant.new)
        patch.setattr(mutant.owner, mutant.method, mistaken)
        seed, error = first_failure(mutant, range(mutant.first, mutant.first + mutant.seeds))
    assert error is not None, f"{mutant.seeds} seeds did not find it"
    assert not isinstance(error, TypeError | AttributeError), (
        f"this mutant cannot run at all: {error}"
    )
    print(f"{name}: seed {seed}, {type(error).__name__}: {str(error)[:200]}")
    _, unchanged = first_failure(mutant, [seed])
    assert unchanged is None, f"seed {seed} deviates without the mistake, too: {unchanged!r}"
