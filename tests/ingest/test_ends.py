"""How a program with a running loader ends, and what it tells when asked: in processes of their own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.errors import LoaderError
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.stages.pool import Pool
from sluice.ingest.stages.transform import Transform
from tests.e2e.test_readme import blocks
from tests.ingest import twin
from tests.ingest.scene import assert_gone
from tests.open_loader import open_loader
from tests.run_program import run_program

pytestmark = pytest.mark.slow

PROCESS = Knobs(backend={"mine": "process"})
NAME = "tests.ingest.worker_functions:"
_RUN = """
import sys, threading
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.process.stacks import on_signal
from sluice.ingest.row_order import Order
from sluice.ingest.stages.transform import Transform

loader = BatchLoader(FeatureTable.open(sys.argv[1]), batch_size=80, order=Order(window_rows=60),
                     read_ahead_epochs=1000,
                     transforms=[Transform("tests.ingest.worker_functions:" + sys.argv[2], "mine")],
                     knobs=Knobs(workers={"mine": 2}, backend={"mine": "process"}))
consumer = threading.Thread(target=lambda: next(iter(loader)), daemon=True)
with on_signal(loader.stacks):
    consumer.start()
    exec(sys.argv[3])
"""
WAIT = "consumer.join()"


@pytest.fixture
def start(table, repo):
    """A program whose worker processes hold a batch each."""
    running = []

    def start(function, then=WAIT):
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", _RUN, table.uri, function, then],
                cwd=repo,
                text=True,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stderr.close()


def test_no_worker_outlives_a_killed_parent(start, scene):
    program = start("hold")
    watched = [os.pidfd_open(pid) for pid in scene.holders(1)]
    program.kill()
    assert_gone(watched)


def test_an_interpreter_ends_although_workers_hang(start, scene):
    program = start("hold", "sys.stdin.readline()")
    watched = [os.pidfd_open(pid) for pid in scene.holders(1)]
    program.stdin.close()
    assert program.wait(60) == 0
    assert_gone(watched)


def test_a_signal_prints_the_stacks_and_no_worker_outlives_a_killed_group(start, scene):
    program = start("hold")
    watched = [os.pidfd_open(pid) for pid in scene.holders(1)]
    os.kill(program.pid, signal.SIGUSR1)
    text, poll = "", select.poll()
    poll.register(program.stderr, select.POLLIN)
    while "in hold" not in text:
        assert poll.poll(60_000), text
        piece = os.read(program.stderr.fileno(), 2**16).decode()
        assert piece, f"the program ended with {program.wait()}: {text}"
        text += piece
    assert "sluice-mine-0" in text or "in __next__" in text, "the program's own threads"
    assert "of mine:" in text
    os.killpg(program.pid, signal.SIGKILL)
    assert_gone(watched)


_LOOP = """
import sys
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.row_order import Order
from sluice.ingest.stages.transform import Transform

def make_loader():
    return BatchLoader(FeatureTable.open(sys.argv[1]), batch_size=80,
                       order=Order(window_rows=60, last="pad"), read_ahead_epochs=1000,
                       transforms=[Transform("tests.ingest.worker_functions:shifted", "mine")],
                       knobs=Knobs(workers={"mine": 2}, backend={"mine": "process"}))

def train(batch):
    print(batch.checksum, flush=True)
    if batch.step == 3 and not position.exists():
        assert loader.worker_pids
        sys.stdin.readline()
"""


def test_sigterm_to_a_whole_group_saves_the_position_and_a_resumed_run_goes_on_with_the_next_row(
    table, repo, tmp_path
):
    """The loop of docs/how-to/resume.md. Workers are in groups of their own: the signal does not reach them, so that
    batches come until the rank ends."""
    (loop,) = (
        block for block in blocks("py", "docs/how-to/resume.md") if "signal.SIGTERM" in block
    )
    seen: list[int] = []
    for code in (143, 0):
        program = subprocess.Popen(
            [sys.executable, "-c", _LOOP + loop, table.uri],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(repo)},
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if code:
            seen += [int(program.stdout.readline()) for _ in range(4)]
            os.killpg(program.pid, signal.SIGTERM)
        rest, err = program.communicate("go on\n", timeout=60)
        assert program.returncode == code, err
        seen += map(int, rest.splitlines())
        assert len(seen) >= 4
    with open_loader(table, batch_size=80, window_rows=60, last="pad") as loader:
        assert seen == [batch.checksum for batch in loader]


def test_two_interrupts_end_a_program_whose_workers_hang(start, scene):
    """The first while every worker holds a batch, the second while the first is being answered."""
    program = start(
        "hold",
        "from sluice.common.program import run; run(lambda _: consumer.join() or {}, argv=[])",
    )
    watched = [os.pidfd_open(pid) for pid in scene.holders(2)]
    os.kill(program.pid, signal.SIGINT)
    os.kill(program.pid, signal.SIGINT)
    assert program.wait(60) == 130
    assert_gone(watched)


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
    twin.eventually(lambda: loader._pipeline.gone)


def test_a_pipeline_may_be_closed_in_the_middle_of_being_turned(table, monkeypatch):
    """By the garbage collector, if the loader was forgotten and the agent's thread is the one that collects."""
    loader = BatchLoader(table, batch_size=80, read_ahead_epochs=100)
    next(iter(loader))
    monkeypatch.setattr(Pool, "resize", lambda _pool, _workers: loader._pipeline.close())
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
    ended = run_program("-c", _BUSY, tmp_path, door)
    assert ended.returncode == 0, ended.stderr
    after_close, at_last = map(eval, ended.stdout.splitlines())
    assert len(after_close) == 6
    assert at_last == []
