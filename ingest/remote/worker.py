"""The program of a remote worker: `sluice worker --table … --listen HOST:PORT --token-file FILE`. `local` is the same
worker as a process that a loader starts on its own host.

A worker opens the table itself. It keeps no state that a loader would miss if the worker ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run
from sluice.common.settings import check, parse, setting
from sluice.etl.spec.code_options import CodeOptions
from sluice.ingest.remote.credentials import read_file, read_token

if TYPE_CHECKING:
    from sluice.etl.spec.permission import Permission
    from sluice.ingest.machine import Machine
    from sluice.ingest.memory.governor import Governor
    from sluice.ingest.remote.maker import UnitMaker
    from sluice.ingest.remote.unit import RemoteJob


_DESCRIPTION = """Reads and shuffles row groups for loaders on other hosts until it is stopped. It first prints one JSON
object with its address."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a worker reads, where it listens, and who may connect."""

    title = "worker"
    table: str = setting(
        help="the feature table, or the folder, glob or file of Parquet, to read", metavar="TABLE"
    )
    listen: str = setting(
        "127.0.0.1:0", "the address to listen at; port 0 takes any free port", metavar="HOST:PORT"
    )
    token_file: str = setting(help="a file with the token that loaders must send", metavar="FILE")
    threads: int = setting(
        0,
        "how many row groups to read at once (default: one for each core that its control group "
        "allows)",
        least=0,
    )
    tls_certificate: str = setting("", "use TLS with this certificate (PEM)", metavar="FILE")
    tls_key: str = setting("", "the certificate's key (PEM)", metavar="FILE")
    code: CodeOptions = field(default_factory=CodeOptions)

    def __post_init__(self) -> None:
        check(self)
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"--listen {self.listen}: write HOST:PORT")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise UsageError("--tls-certificate and --tls-key: give both")


def main(argv: list[str]) -> dict[str, Any]:
    options = parse(WorkerOptions, argv, "sluice worker", description=_DESCRIPTION)

    from sluice.ingest.machine import Machine
    from sluice.ingest.remote.server import WorkerServer

    token = read_token(options.token_file)
    certificate = (
        (read_file(options.tls_certificate), read_file(options.tls_key))
        if options.tls_certificate
        else None
    )
    permission = options.code.permission
    machine = Machine()
    governor = memory_of(machine)
    server = WorkerServer(
        options.listen,
        token,
        partial(open_maker, options.table, permission, governor=governor),
        threads=options.threads or threads_of(machine),
        certificate=certificate,
        permission=permission,
    )
    print(json.dumps({"listening": server.address}), flush=True)
    say(f"listening at {server.address}; reads {options.table} for loaders that have the token")
    server.serve()
    return {"listening": server.address}


def threads_of(machine: Machine) -> int:
    """Returns how many units a worker makes at once: one for each core of its control groups' quota, rounded up."""
    return math.ceil(machine.cores())


def memory_of(machine: Machine) -> Governor:
    """Returns what admits units into the memory that control groups, the host and ulimit allow this process."""
    from sluice.ingest.memory.buffers import Buffers
    from sluice.ingest.memory.process_memory import ProcessMemory

    return ProcessMemory(machine, None, Buffers()).new_governor(0)


def local(_owner: str) -> None:
    """Runs a loader's own worker. It reads its table and token from one line of standard input, and prints its address
    on standard output. It ends when the loader, which holds the other end of its input, ends."""
    from sluice.etl.spec.permission import NOTHING, Permission
    from sluice.ingest.process.child_main import end_with_parent
    from sluice.ingest.remote.server import WorkerServer
    from sluice.ingest.remote.unit import RemoteJob

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
        partial(open_maker, given["table"], NOTHING),
        permission=Permission(functions=frozenset(given["functions"])),
    )
    if given["job"]:  # opening takes seconds, so it is done before the loader sends requests
        with contextlib.suppress(Exception):  # the first request raises the error
            server.open(RemoteJob.of(given["job"]))
    told = {"listening": server.address, "pid": os.getpid()}
    os.write(output, json.dumps(told).encode() + b"\n")
    threading.Event().wait()


def open_maker(
    table: str | list[str],
    permission: Permission,
    job: RemoteJob,
    governor: Governor | None = None,
) -> UnitMaker:
    """Opens the table for a job and returns what makes the job's units, as far as the `governor` admits them."""
    from sluice.ingest.read.parquet_files import ParquetFiles
    from sluice.ingest.read.source_files import is_table
    from sluice.ingest.remote.maker import UnitMaker
    from sluice.ingest.remote.messages import RemoteError

    if isinstance(table, str) and is_table(table):
        # This needs delta-rs, which plain Parquet does not.
        from sluice.etl.table.table import FeatureTable

        if not job.version.isdigit():
            raise RemoteError(
                f"{table}: the loader reads plain Parquet, but this worker was given a feature table"
            )
        source = FeatureTable.open(table, int(job.version), allow_code=permission)
        return UnitMaker(job, source, governor)
    files = ParquetFiles.open(table, job.roles, job.hash, permission=permission, say=lambda _: None)
    if files.version != job.version:
        raise RemoteError(
            f"{files.uri}: other files than the loader has (version {files.version} here, "
            f"{job.version} there); give both the same files"
        )
    return UnitMaker(job, files, governor)


def program() -> NoReturn:
    """Runs the program `sluice worker`."""
    run(main)


if __name__ == "__main__":
    program()
