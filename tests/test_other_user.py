"""Another user of the same machine: what of ours he can write into, connect to, or lead astray. What he may read is in
docs/faults.md."""

import os
import socket
import stat
import uuid
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import psutil

from benchmarks.small_table import small_table
from sluice import Errors, Knobs
from sluice.agent.report import page
from sluice.agent.runtime.saved_state import KnobContext, Registry, SavedState
from sluice.etl.spark.session import DEFAULTS
from tests import ports
from tests.product import Endpoint, Journal, PinKeeper, Quarantine, RunFolder, WorkerProcess, served
from tests.raises import raises

STATE = SavedState(
    context=KnobContext(machine="m", schema="s", row_bytes=1.0), knobs=Knobs(), rows_per_s=1.0
)


@contextmanager
def umask(mask: int):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def writable_by_others(folder: Path) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in [folder, *folder.rglob("*")]
        if not path.is_symlink() and path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ]


def test_nothing_that_programs_leave_can_be_written_by_others(tmp_path):
    """Under the usual umask: tables with pins, run folders, registries with claims, caches, knobs, lists of rows."""
    with umask(0o022):
        place = tmp_path / "ours"
        place.mkdir()
        table = small_table(place / "table", rows=20, files=1, splits={"train": 1.0})
        with (
            RunFolder.create(place / "run", {"kind": "train"}) as folder,
            closing(Journal()) as journal,
        ):
            journal.open(folder)
            journal.event({"kind": "start", "steps": 1})
            journal.metric(
                {"kind": "train", "step": 1, "loss": 0.5, "samples_per_s": 1.0, "stall": 0.0}
            )
            page.write(place / "run")
        Registry(place / "registry").remember(STATE)
        STATE.save(str(place / "best.json"))
        books = Quarantine(Errors(on_error="quarantine", quarantine=place / "aside.jsonl"))
        books.add(ValueError("bad"), stage="s", group=("f", 0), rows=[0])
        books.close()
        with PinKeeper("reader", print) as hold:
            hold.take(table.uri, 0)
            assert len([p for p in place.rglob("*") if p.is_file()]) > 10
            assert writable_by_others(place) == []


def test_a_worker_is_reached_over_sockets_and_memory_without_a_name(tmp_path):
    """Neither a port nor a path: another user has nothing to open. A Spark session of other tests is not looked at."""

    def listening() -> set[tuple]:
        return {
            c.laddr
            for c in psutil.Process().net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        }

    before, others = listening(), set(psutil.Process().children(recursive=True))
    with WorkerProcess(
        "tests.ingest.worker_functions:double", charge=lambda size, own: None
    ) as worker:
        assert worker.call({"a": np.arange(5.0)}) is not None
        children = [
            child for child in psutil.Process().children(recursive=True) if child not in others
        ]
        assert children
        assert listening() <= before
        for process in children:
            assert [
                c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN
            ] == []
        named = [
            c.laddr for process in children for c in process.net_connections("unix") if c.laddr
        ]
        assert named == []


def test_what_listens_does_so_on_this_machine_alone_and_takes_no_orders():
    assert DEFAULTS["spark.ui.enabled"] == "false"  # whoever reached it could end a job's stages
    port = ports.free()
    with (
        served(Endpoint(0), str(port), 0),
        socket.create_connection(("127.0.0.1", port), 60) as client,
    ):
        client.sendall(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        client.settimeout(60)
        assert b" 405 " in client.recv(4096).splitlines()[0]  # only asking is allowed
        listening = [
            c.laddr.ip
            for c in psutil.Process().net_connections("inet")
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port
        ]
        assert listening == ["127.0.0.1"]


def test_a_link_that_waits_under_a_temporary_name_is_not_followed(tmp_path, monkeypatch):
    """In a folder where others may write, as /tmp. Even if its random part were guessed."""
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=1))
    (tmp_path / "victim").write_text("mine")
    (tmp_path / f".best.json.{uuid.UUID(int=1).hex}").symlink_to(tmp_path / "victim")
    with raises(FileExistsError, "best.json"):
        STATE.save(str(tmp_path / "best.json"))
    assert (tmp_path / "victim").read_text() == "mine"
