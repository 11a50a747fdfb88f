"""Worker processes: the same results as in place, and every fault struck while the victim holds an item."""

import functools
import itertools
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sluice.ingest.process import child
from sluice.ingest.process import worker as worker_module
from sluice.ingest.process.worker import WorkerError
from tests.ingest import worker_functions
from tests.ingest.scene import assert_gone
from tests.ingest.twin import eventually
from tests.product import (
    FunctionError,
    SharedMemoryError,
    WorkerClosed,
    WorkerCrashed,
    WorkerProcess,
)
from tests.raises import MISTAKES, assert_names, raises

pytestmark = pytest.mark.slow

NAME = "tests.ingest.worker_functions:"
ROOT = Path(__file__).resolve().parents[2]
A = {"a": np.arange(5.0)}


@pytest.fixture
def submit():
    """Calls a function in a thread of its own, and returns what waits for its result."""
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def test_a_process_that_dies_while_it_starts_counts_as_replaced(monkeypatch):
    replaced = []
    with WorkerProcess(NAME + "double", restarted=lambda: replaced.append(1)) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(worker_module.Child, "receive", _dies)
            with pytest.raises(WorkerError, match="cannot start"):
                worker.start()
        assert worker.call(A)["a"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
        assert replaced == [1]


def _dies(child, limit_s):
    child.kill()
    raise worker_module.Died("it was ended by SIGKILL")


# ---- results


def test_the_time_of_a_start_is_in_no_call(monkeypatch):
    asked = []

    def seconds(pid):
        """A start takes 5 s of a core and 7 s of waiting, each call 1 and 2, until a process is asked again."""
        asked.append(pid)
        calls = asked.count(pid) - 1
        return 5.0 + calls, 7.0 + 2 * calls

    monkeypatch.setattr(worker_module, "core_seconds", seconds)
    with WorkerProcess(NAME + "double") as worker:
        for _ in range(2):
            worker.call(A)
            assert worker.spent() == (1.0, 2.0)
        os.kill(worker.pid, signal.SIGKILL)
        worker.call(A)
        assert worker.spent() == (1.0, 2.0), "a new process has another start"
        assert len(set(asked)) == 2


def test_results_are_those_of_a_call_in_place():
    rng = np.random.default_rng(3)
    with WorkerProcess(NAME + "double") as worker:
        for _ in range(30):
            columns = {
                f"c{i}": (rng.random(tuple(rng.integers(0, 9, rng.integers(0, 4)))) * 60).astype(
                    dtype
                )
                for i, dtype in enumerate(("f4", "i1", "i8", "f8", ">i4", "c8"))
            }
            got, wanted = worker.call(columns), worker_functions.double(columns)
            assert list(got) == list(wanted)
            for name, array in wanted.items():
                np.testing.assert_array_equal(got[name], array, strict=True)


def test_what_the_function_does_not_return_stays_as_it_left_it():
    columns = {
        "written": np.zeros(3),
        "untouched": np.arange(4),
        "a": np.ones(2),
        "b": np.full(5, 2.0),
    }
    before = {name: array.copy() for name, array in columns.items()}
    with WorkerProcess(NAME + "write_in_place") as worker:
        got = worker.call(columns)
    np.testing.assert_equal(columns, before, "the caller's arrays are not written")
    assert {name: array.tolist() for name, array in got.items()} == {
        "written": [7.0] * 3,
        "untouched": [0, 1, 2, 3],
        "a": [2.0] * 5,
        "b": [1.0] * 2,
        "backwards": [3, 2, 1, 0],
    }


def test_items_of_one_size_share_their_memory_and_the_last_result_outlives_the_worker():
    with WorkerProcess(NAME + "double") as worker:
        held = {worker.call(A) and worker._region.size for _ in range(20)}
        last = worker.call(A)["a"]
    assert len(held) == 1
    assert (last == A["a"] * 2).all()


# ---- errors


@pytest.mark.parametrize(
    ("kind", "type_", "text"),
    MISTAKES["worker_error"],
)
def test_any_error_crosses_as_text_and_the_worker_lives(kind, type_, text):
    with WorkerProcess(NAME + "fail") as worker:
        worker.call({"kind": np.zeros(0, np.uint8)})
        pid, held = worker.pid, worker._region.size
        for _ in range(3):
            with raises(FunctionError, "part-0 row group 3") as caught:
                worker.call({"kind": np.frombuffer(kind.encode(), np.uint8)}, "part-0 row group 3")
        error = caught.value
        assert error.type == type_
        assert text in error.text
        assert type_ in error.kinds
        assert len(str(error)) < 20_000
        assert "worker_functions.py" in error.trace or kind in ("list", "objects")
        assert worker.call({"kind": np.zeros(0, np.uint8)}) is not None
        assert (worker.pid, worker._region.size) == (pid, held)


def test_a_function_that_is_not_there_is_an_error_at_the_start():
    with (
        WorkerProcess(NAME + "nothing") as worker,
        raises(FunctionError, NAME + "nothing", "start") as e,
    ):
        worker.start()
    assert "AttributeError" in e.value.kinds


def test_an_error_at_the_start_that_nothing_describes_counts_as_a_death(monkeypatch):
    monkeypatch.setattr(child.Child, "receive", lambda *_: {"error": 1})
    with WorkerProcess(NAME + "double") as worker:
        with raises(WorkerCrashed, "3 times", "error: it is not described"):
            worker.call(A)
        with raises(WorkerError, "cannot start", "error: it is not described"):
            worker.start()


# ---- deaths


def test_every_item_killed_once_arrives_once(scene):
    """Three threads with a worker each share twelve items; the first worker that holds an item is killed."""
    restarts = []

    def forward(items):
        restarted = functools.partial(restarts.append, 1)
        with WorkerProcess(NAME + "hold_each_once", restarted=restarted) as worker:
            return [int(worker.call({"item": np.array([item])})["item"][0]) for item in items]

    with ThreadPoolExecutor(3) as threads:
        results = threads.map(forward, np.arange(12).reshape(3, 4))
        for _ in range(12):
            os.kill(scene.holders()[0], signal.SIGKILL)
        assert sorted(itertools.chain(*results)) == [2 * item for item in range(12)]
    assert len(restarts) == 12


def test_an_interrupt_in_the_middle_of_an_item_leaves_nothing_to_the_next(scene):
    with WorkerProcess(NAME + "interrupt_parent") as worker:
        with pytest.raises(KeyboardInterrupt):
            worker.call({"first": np.zeros(3)})
        assert worker.pid is None
        assert list(worker.call(A)) == ["a"]


def test_a_worker_that_hangs_is_ended_and_its_stack_told(scene, submit):
    with WorkerProcess(NAME + "stuck_in_native_code", limit_s=0.3, deaths=1) as worker:
        call = submit(worker.call, A, "part-9")
        assert scene.holders() == [worker.pid]
        error = call.exception(60)
    assert isinstance(error, WorkerCrashed)
    assert_names(str(error), "part-9", "0.3 s")
    assert "stuck_in_native_code" in error.stack


def test_a_stopped_worker_that_comes_back_delivers_no_second_result(scene, submit):
    with WorkerProcess(NAME + "hold_until_told") as worker:
        call = submit(worker.call, A)
        (pid,) = scene.holders()
        os.kill(pid, signal.SIGSTOP)
        scene.go()
        os.kill(pid, signal.SIGCONT)
        np.testing.assert_array_equal(call.result(60)["a"], A["a"] * 2)
        again = submit(worker.call, {"b": np.arange(3)})
        assert scene.holders() == [pid]
        scene.go()
        assert list(again.result(60)) == ["b"], "the next answer is to the next item"
    assert scene.attempts == 2


def test_a_stopped_worker_past_its_time_is_replaced(scene, submit):
    with WorkerProcess(NAME + "hold_first", limit_s=0.5) as worker:
        call = submit(worker.call, A)
        (victim,) = scene.holders()
        back = os.pidfd_open(victim)
        signal.pidfd_send_signal(back, signal.SIGSTOP)
        np.testing.assert_array_equal(call.result(60)["a"], A["a"] * 2)
        with pytest.raises(ProcessLookupError):  # it cannot come back
            signal.pidfd_send_signal(back, signal.SIGCONT)
        os.close(back)
    assert scene.attempts == 2


# ---- the end


@pytest.mark.parametrize("whole_group", [False, True])
def test_workers_end_with_their_parent(scene, whole_group):
    """One idle, one that holds an item and the interpreter lock: both gone within two seconds of kill -9."""
    code = f"""if True:
        import numpy, sys, threading
        from sluice.ingest.process.worker import WorkerProcess
        idle, busy = WorkerProcess({NAME!r} + "double"), WorkerProcess({NAME!r} + "stuck_in_native_code")
        idle.start(), busy.start()
        print(idle.pid, busy.pid, flush=True)
        busy.call(dict(a=numpy.zeros(3)))
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    idle, busy = map(int, parent.stdout.readline().split())
    watched = [os.pidfd_open(pid) for pid in (idle, busy)]
    assert scene.holders() == [busy]
    if whole_group:
        os.killpg(parent.pid, signal.SIGKILL)
    else:
        parent.kill()
    parent.communicate()
    assert_gone(watched)


@pytest.mark.parametrize("who", ["worker", "parent"])
def test_what_a_function_started_ends_with_its_worker(scene, who):
    code = f"""if True:
        import numpy
        from sluice.ingest.process.worker import WorkerProcess
        try:
            WorkerProcess({NAME!r} + "hold_with_helper", deaths=1).call(dict(a=numpy.zeros(3)))
        except Exception as error:
            print(type(error).__name__)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    worker, helper = scene.holders()
    watched = [os.pidfd_open(pid) for pid in (worker, helper)]
    if who == "worker":
        os.kill(worker, signal.SIGKILL)
    else:
        parent.kill()
    assert parent.communicate()[0] == ("WorkerCrashed\n" if who == "worker" else "")
    assert_gone(watched)


def test_close_in_the_middle_of_a_call(scene, submit):
    worker = WorkerProcess(NAME + "hold")
    call = submit(worker.call, A)
    (pid,) = scene.holders()
    worker.close()
    assert isinstance(call.exception(60), WorkerClosed)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    worker.close()
    with pytest.raises(WorkerClosed):
        worker.call(A)
    assert scene.attempts == 1


# ---- shared memory that is not there


@pytest.fixture
def small_files():
    """The kernel refuses any file, memfds as well, beyond 4 MiB, also to workers that start now."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "columns",
    [{"count": np.array([10**6])}, {"count": np.full(10**6, 3)}],
    ids=["the result", "the input"],
)
def test_no_room_in_shared_memory_is_one_clear_error(small_files, columns):
    charges = []
    small_files()

    def charge(size, own):
        charges.append(0 if own else size)

    with WorkerProcess(NAME + "grow", charge=charge) as worker:
        worker.call({"count": np.array([2])})
        pid = worker.pid
        with raises(SharedMemoryError, "shared memory", "MiB", "backend=thread"):
            worker.call(columns)
        assert sum(charges) == worker._region.size
        assert worker.call({"count": np.array([2])})["out"].tolist() == [7.0, 7.0]
        assert worker.pid == pid, "the worker lives"
    assert sum(charges) == 0


def test_a_process_is_charged_while_it_starts():
    charges = []
    with WorkerProcess(NAME + "double", charge=lambda size, own: charges.append(size)) as worker:
        worker.start_in_background(2**40)
        eventually(lambda: not worker.is_starting)
        assert sum(charges) == worker.bytes > 0
    assert sum(charges) == 0


def test_a_process_that_ends_before_its_first_word_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(child, "_PROGRAM", "sys:exit")
    before = len(os.listdir("/proc/self/fd"))
    with (
        WorkerProcess(NAME + "double") as worker,
        raises(WorkerError, "double", "exit code") as error,
    ):
        worker.start()
    assert "memory" not in str(error.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_cannot_start_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(child.interpreter, "command", lambda *_: ["/no/such/program"])
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        child.Child(NAME + "double", 0)
    assert os.listdir("/proc/self/fd") == before
