"""Real worker processes: killed, more and fewer of them while a loader runs, and none that survives its run."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from zlib import crc32

import pytest

from sluice.ingest.knobs import REQUESTS_A_CORE
from sluice.ingest.machine import WORKER_PROCESS_BYTES
from tests.ingest.remote.conftest import halving_loader, remote_knobs, wait_for
from tests.open_loader import open_loader
from tests.product import WorkerServer
from tests.raises import assert_names
from tests.run_program import last_json, run_program

pytestmark = pytest.mark.slow


def ended(pid: int, within_s: float = 30.0) -> bool:
    """Whether a process ends in that time; it may be gone already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(within_s * 1000))
    finally:
        os.close(descriptor)


def hashes(loader, epochs, at=lambda epoch, step: None, values=None):
    order = []
    for epoch in range(epochs):
        for step, batch in enumerate(loader):
            at(epoch, step)
            if values is not None:
                values.append(
                    [
                        crc32(part.numpy().tobytes())
                        for part in (batch.dense, batch.values, batch.label)
                    ]
                )
        order.append(loader.order_hash)
    return order


def test_order_and_rows_stay_while_workers_that_read_and_transform_are_killed_come_and_go(table):
    expected, order_seen = [], []
    with halving_loader(table, 6) as loader:
        order = hashes(loader, 6, values=expected)
    with halving_loader(table, 6, workers="local:2", knobs=remote_knobs(2)) as loader:
        fleet, seen, killed, charged = loader._remote.fleet, set(), [], []
        account, fleet.charge = fleet.charge, lambda size: (charged.append(size), account(size))

        def workers(count):
            with fleet.changed:
                wait_for(fleet, lambda: sum(not w.leaving for w in fleet.workers) == count)
                seen.update(w.pid for w in fleet.workers)

        def kill():
            workers(2)
            killed.append(loader.remote_pids[0])
            os.kill(killed[-1], signal.SIGKILL)

        def at(epoch, step):
            if step == 5 and epoch in (0, 4):
                kill()
            if (epoch, step) == (2, 0):
                loader.apply(remote_knobs(1))
                workers(1)
            if (epoch, step) == (4, 0):
                loader.apply(remote_knobs(2))

        assert hashes(loader, 6, at, order_seen) == order
        assert loader.remote["units"] > 0
        assert loader.remote["calls"] >= 6 * 24
        assert loader.remote["start_s"] > 0
        assert loader.remote["requests_a_core"] == REQUESTS_A_CORE, (
            "the planner reckons with as many"
        )
        last = set(loader.remote_pids)
    assert order_seen == expected
    assert len(killed) == 2
    assert len(seen | last) >= 3, "those that were killed or sent home were replaced"
    for pid in seen | last:
        assert ended(pid)
    assert loader.remote_pids == []
    for thread in threading.enumerate():
        if thread.name == "sluice-remote-worker":
            thread.join(60)
    assert max(charged) >= WORKER_PROCESS_BYTES
    assert sum(charged) == 0, "what they took of this host was given back"


def test_a_trainer_that_was_stopped_for_longer_than_any_answer_may_take_goes_on_and_its_workers_end_with_it(
    serving, table, repo, named
):
    class Late(WorkerServer):
        """A worker whose first answers come when it is too late for them."""

        asked, stopped, late = threading.Event(), threading.Event(), threading.Event()

        def do_action(self, context, action):
            if action.type != "read":
                return super().do_action(context, action)
            self.asked.set()
            self.stopped.wait(60)
            while not self.late.wait(0.02):
                if context.is_cancelled():  # its time was over while the trainer could not see that
                    self.late.set()
            return super().do_action(context, action)

    server = serving(Late)
    with open_loader(table, batch_size=160, reader="arrow") as loader:
        [expected] = hashes(loader, 1)
    code = (
        "import sys; from tests.open_loader import open_loader; from sluice.ingest.remote import client\n"
        "client._TIMEOUT_S, client._FIRST_S, client._LEAST_S = 1.0, 0.05, 0.05\n"
        f"how = {{'batch_size': 160, 'reader': 'arrow'}}; loader = open_loader({table.uri!r}, "
        f"workers={named(server)!r}, **how)\n"
        "rows = sum(batch.label.shape[0] for batch in loader)\n"
        "print(loader.order_hash, rows, loader.remote['retries'], flush=True); loader.close()\n"
        f"own = open_loader({table.uri!r}, workers='local:1', **how); batches = iter(own); next(batches)\n"
        "print(*own.remote_pids, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=repo,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert server.asked.wait(60)
        trainer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, trainer.pid, os.WSTOPPED | os.WNOWAIT)
        server.stopped.set()
        assert server.late.wait(60)
        trainer.send_signal(signal.SIGCONT)
        order_hash, rows, retries = trainer.stdout.readline().split()
        assert (order_hash, int(rows)) == (expected, 4000 // 160 * 160)
        assert int(retries) > 0, "what came too late was asked for again"
        worker = int(trainer.stdout.readline())
        assert not ended(worker, 0)
        trainer.kill()
        assert ended(worker)


def test_bench_counts_epochs_and_faults_of_its_own_workers_and_a_plain_worker_serves_others(
    repo, table, tmp_path
):
    (tmp_path / "token").write_text("mine")
    worker_words = (
        f"sluice worker --table {table.uri} --listen 127.0.0.1:0"
        f" --token-file {tmp_path / 'token'} --threads 1"
    )
    bench_words = (
        f"ingest bench {table.uri} --batch-size 160 --epochs 3 --reader arrow --workers local:2"
        " --step-ms 20 --inject kill-remote=all@0.3s,kill-remote@1000s"
    )
    with subprocess.Popen(
        [sys.executable, "-m", *worker_words.split()],
        cwd=repo,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        done = run_program("-m", *bench_words.split())
        address = json.loads(worker.stdout.readline())["listening"]
        with open_loader(
            table,
            batch_size=160,
            epochs=3,
            workers=f"{address}?token={tmp_path / 'token'}",
            reader="arrow",
        ) as loader:
            expected = hashes(loader, 3)
            assert (loader.remote["workers"], loader.remote["retries"]) == (1, 0)
        worker.send_signal(signal.SIGINT)
        assert worker.wait(60) == 130
    assert done.returncode == 0, done.stderr
    last = last_json(done)
    assert (last["order_hash"], last["order_hashes"]) == (expected[-1], expected)
    assert last["faults"]["missed"] == ["kill-remote=1@1000s"]
    assert_names(done.stderr, "kill-remote=all@0.3s", "SIGKILL")
    assert last["knobs"]["backend"]["decode"] == "remote"
    assert (last["rows"], last["workers"] <= 2, last["retries"] >= 0) == (
        3 * (4000 // 160 * 160),
        True,
        True,
    )
