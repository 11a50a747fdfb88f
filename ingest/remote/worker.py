"""The program of a remote worker: `local`. It opens the table itself, and keeps no state that a loader would miss if
the worker ended."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from functools import partial

from sluice.etl.spec.permission import NOTHING, Permission
from sluice.ingest.process.child_main import end_with_parent
from sluice.ingest.read.parquet_files import ParquetFiles, is_table
from sluice.ingest.remote.maker import UnitMaker
from sluice.ingest.remote.server import WorkerServer
from sluice.ingest.remote.unit import RemoteError, RemoteJob


def local(_owner: str) -> None:
    """Runs a loader's worker. It reads its table and token from one line of standard input, and prints its address on
    standard output. It ends when the loader, which holds the other end of its input, ends."""
    output = os.dup(1)
    os.dup2(2, 1)  # other code's prints go to standard error
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the loader has ended already
    given = json.loads(line)
    end_with_parent(0)
    server = WorkerServer(
        given.get("listen", "127.0.0.1:0"),
        given["token"],
        partial(open_maker, given["table"]),
        permission=Permission(functions=frozenset(given["functions"])),
    )
    if given["job"]:  # opening takes seconds, so it is done before the loader sends requests
        with contextlib.suppress(Exception):  # the first request raises the error
            server.open(RemoteJob.of(given["job"]))
    os.write(output, json.dumps({"listening": server.address}).encode() + b"\n")
    threading.Event().wait()


def open_maker(table: str | list[str], job: RemoteJob) -> UnitMaker:
    """Opens the table for a job and returns what makes the job's units."""
    if isinstance(table, str) and is_table(table):
        # This needs delta-rs, which plain Parquet does not.
        from sluice.etl.table.table import FeatureTable

        return UnitMaker(job, FeatureTable.open(table, int(job.version), allow_code=NOTHING))
    files = ParquetFiles.open(table, job.roles, job.hash, permission=NOTHING, say=lambda _: None)
    if files.version != job.version:
        raise RemoteError(
            f"{files.uri}: other files than the loader has (version {files.version} here, "
            f"{job.version} there); give both the same files"
        )
    return UnitMaker(job, files)
