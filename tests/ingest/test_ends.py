"""How a program with a running loader ends, and what it tells when asked: in processes of their own."""

import os
import signal
import threading
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import Knobs, Transform
from sluice.ingest.stages.pool import Pool
from tests.e2e.test_readme import blocks
from tests.ingest import twin
from tests.ingest.scene import assert_gone
from tests.open_loader import open_loader
from tests.product import BatchLoader, LoaderError
from tests.run_program import run_program

pytestmark = pytest.mark.slow

PROCESS = Knobs(backend={"mine": "process"})
NAME = "tests.ingest.worker_functions:"


def watched(pids: list[int]) -> list[int]:
    return [os.pidfd_open(pid) for pid in pids]


@pytest.fixture
def start(table, forks, scene, monkeypatch, repo):
    """Begins a program of ending.py."""
    monkeypatch.setenv("PYTHONPATH", str(repo))  # it works elsewhere
    with ExitStack() as stack:
        yield lambda what: stack.enter_context(
            forks.start("tests.ingest.ending", what, table.uri, tmp=scene.path)
        )


def test_an_interpreter_ends_although_workers_hang(start, scene):
    program = start("hold")
    workers = watched(scene.holders(1))
    scene.go()
    assert program.ended().returncode == 0
    assert_gone(workers)


def test_a_signal_prints_the_stacks_and_no_worker_outlives_a_killed_parent(start, scene):
    program = start("hold")
    workers = watched(scene.holders(1))
    program.send(signal.SIGUSR1)
    program.until("in hold")
    text = program.err.read_text()
    assert "in until_told" in text, "the program's own threads"
    assert "of mine:" in text
    program.send(signal.SIGKILL)
    assert_gone(workers)


def test_sigterm_to_a_whole_group_saves_the_position_and_a_resumed_run_goes_on_with_the_next_row(
    table, start, scene
):
    """The loop of docs/how-to/resume.md. Workers are in groups of their own: the signal does not reach them, so that
    batches come until the rank ends."""
    (loop,) = (
        block for block in blocks("py", "docs/how-to/resume.md") if "signal.SIGTERM" in block
    )
    seen: list[str] = []
    for code in (143, 0):
        program = start(loop)
        if code:
            for _ in range(4):
                program.until("\n", program.out)
            os.killpg(program.pids[0], signal.SIGTERM)
            scene.go()
        ended = program.ended()
        assert ended.returncode == code, ended.stderr
        seen += ended.stdout.splitlines()
        assert len(seen) >= 4
    with open_loader(table, batch_size=80, window_rows=60, last="pad") as loader:
        assert seen == [str(batch.checksum) for batch in loader]


def test_two_interrupts_end_a_program_whose_workers_hang(start, scene):
    """The first while every worker holds a batch, the second while the first is being answered."""
    program = start("answer")
    workers = watched(scene.holders(2))
    for _ in range(2):
        program.send(signal.SIGINT)
    assert program.ended().returncode == 130
    assert_gone(workers)


def test_a_function_that_hangs_in_a_thread_holds_an_interrupt_up_for_less_than_two_seconds(
    table, monkeypatch
):
    inside, over, waited, join = threading.Event(), threading.Event(), [], Pool.join

    def hangs(columns):
        inside.set()
        over.wait()

    def noted(pool, timeout_s):
        waited.append(timeout_s)
        join(pool, 0)

    monkeypatch.setattr(Pool, "join", noted)
    with BatchLoader(table, batch_size=80, transforms=[Transform(hangs, "mine")]) as loader:

        def consume():
            with pytest.raises(LoaderError):
                next(iter(loader))

        consumer = threading.Thread(target=consume)
        consumer.start()
        inside.wait()
        loader.close()
        over.set()
        consumer.join()
    assert 0 < max(waited) < 2


def test_close_from_many_threads_at_once_is_one_close(table):
    loader = BatchLoader(
        table,
        batch_size=80,
        read_ahead_epochs=100,
        transforms=[Transform(NAME + "shifted", "mine")],
        knobs=PROCESS,
    )
    next(iter(loader))
    threads = [threading.Thread(target=loader.close) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    twin.eventually(lambda: loader.pipeline.gone)


def test_a_pipeline_may_be_closed_in_the_middle_of_being_turned(table, monkeypatch):
    """By the garbage collector, if the loader was forgotten and the agent's thread is the one that collects."""
    loader = BatchLoader(table, batch_size=80, read_ahead_epochs=100)
    next(iter(loader))
    monkeypatch.setattr(Pool, "resize", lambda _pool, _workers: loader.pipeline.close())
    turning = threading.Thread(target=loader.apply, args=(loader.knobs,), daemon=True)
    turning.start()
    turning.join(60)
    assert not turning.is_alive()
    loader.close()


_BUSY = """
import atexit, sys, threading
names = lambda: [thread.name for thread in threading.enumerate() if thread.name.startswith(("sluice-d", "sluice-T"))]
atexit.register(lambda: print(names()))  # the first to register is the last to run

import sluice
from sluice.ingest.knobs import Knobs
from sluice.petastorm import TransformSpec, make_batch_reader

every = threading.Barrier(7)

def busy(frame):
    every.wait()
    while True:
        sum(range(10**6))  # holds the interpreter's lock

spec = TransformSpec(busy)
if sys.argv[2] == "Loader":
    loader = sluice.Loader(sys.argv[1], batch_size=80, transforms=[spec], tuning="fixed",
                           roles={"label": "label", "dense": ["x"]}, knobs=Knobs(workers={"TransformSpec": 6}))
else:
    loader = make_batch_reader("file://" + sys.argv[1], transform_spec=spec, workers_count=6)
    loader.close = lambda: (loader.stop(), loader.join())
threading.Thread(target=lambda: next(iter(loader)), daemon=True).start()
every.wait()
loader.close()
print(names())
"""


@pytest.mark.parametrize("door", ["Loader", "make_batch_reader"])
def test_no_reader_is_in_a_users_function_when_the_interpreter_is_taken_down(tmp_path, door):
    """The function never returns, and six readers are in it when the program ends."""
    table = pa.table({"label": [0, 1] * 500, "x": np.arange(1000.0)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=50)
    ended = run_program("-c", _BUSY, tmp_path, door, check=True)
    after_close, at_last = map(eval, ended.stdout.splitlines())
    assert len(after_close) == 6
    assert at_last == []
