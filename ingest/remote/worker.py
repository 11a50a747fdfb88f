"""The program of a worker: `sluice worker --table … --listen HOST:PORT --token-file FILE`; and `local`, the same as a
process of a loader on this host.

It opens the table itself, and holds nothing that a loader would miss if it ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.common.settings import check, parse, setting
from sluice.etl.spec.code_options import CodeOptions
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.ingest.knobs import parse_bytes
from sluice.ingest.machine import Machine
from sluice.ingest.process.child_main import end_with_parent
from sluice.ingest.read.parquet_files import ParquetFiles, is_table
from sluice.ingest.remote.maker import UnitMaker
from sluice.ingest.remote.server import WorkerServer
from sluice.ingest.remote.unit import RemoteError, RemoteJob

_DESCRIPTION = """Reads and shuffles row groups for loaders on other hosts, until it is ended. It prints one JSON object
with its address first."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a worker reads, where it listens and whom it lets in."""

    title = "worker"
    table: str = setting(
        help="the feature table, or folder, glob or file of Parquet, that it reads", metavar="TABLE"
    )
    listen: str = setting(
        "127.0.0.1:0", "where it listens; port 0: any that is free", metavar="HOST:PORT"
    )
    token_file: str = setting(help="a file whose text whoever asks must know", metavar="FILE")
    share: int = setting(
        2**28,
        "how much of what one loader was given is kept for others of the same table and plan",
        metavar="BYTES",
        parse=parse_bytes,
        least=0,
    )
    threads: int = setting(
        0,
        "how many row groups it reads at once (default: one for each core that its control group "
        "allows)",
        least=0,
    )
    tls_certificate: str = setting("", "speak TLS, with this certificate (PEM)", metavar="FILE")
    tls_key: str = setting("", "and its key", metavar="FILE")
    code: CodeOptions = field(default_factory=CodeOptions)

    def __post_init__(self) -> None:
        check(self)
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit():
            raise UsageError(f"--listen {self.listen}: write HOST:PORT")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise UsageError("--tls-certificate and --tls-key: give both")


def main(argv: list[str]) -> dict[str, Any]:
    options = parse(WorkerOptions, argv=argv, prog="sluice worker", description=_DESCRIPTION)
    token = _file(options.token_file).decode().strip()
    if not token:
        raise UsageError(f"--token-file {options.token_file}: is empty")
    certificate = (
        (_file(options.tls_certificate), _file(options.tls_key))
        if options.tls_certificate
        else None
    )
    permission = options.code.permission
    server = WorkerServer(
        options.listen,
        token,
        partial(opened, options.table, permission),
        threads=options.threads or math.ceil(Machine().cores()),
        certificate=certificate,
        permission=permission,
        share_bytes=options.share,
    )
    print(json.dumps({"listening": server.address}), flush=True)
    say(f"reads {options.table} for who has the token; listens at {server.address}")
    server.serve()
    return {"listening": server.address}


def local(_owner: str) -> None:
    """A loader's own worker. A line of standard input tells it of its table and token; it says on standard output where
    it listens, and ends with the loader, which holds the other end of its input."""
    told = os.dup(1)
    os.dup2(2, 1)  # what others print
    line = sys.stdin.buffer.readline()
    if not line:
        return  # the loader has ended already
    given = json.loads(line)
    end_with_parent(0)
    server = WorkerServer(
        given.get("listen", "127.0.0.1:0"),
        given["token"],
        partial(opened, given["table"], NOTHING),
        permission=Permission(functions=frozenset(given["functions"])),
    )
    if given["job"]:  # opening takes seconds, in which others can answer
        with contextlib.suppress(Exception):  # whoever asks is told
            server.open(RemoteJob.of(given["job"]))
    os.write(told, json.dumps({"listening": server.address}).encode() + b"\n")
    threading.Event().wait()


def opened(table: str | list[str], permission: Permission, job: RemoteJob) -> UnitMaker:
    """Who makes the units of a job on this table."""
    if isinstance(table, str) and is_table(table):
        from sluice.etl.table.table import (
            FeatureTable,
        )  # needs delta-rs, which plain Parquet does not

        if not job.version.isdigit():
            raise RemoteError(
                f"{table}: the loader reads plain Parquet, and this worker has a feature table"
            )
        return UnitMaker(job, FeatureTable.open(table, int(job.version), allow_code=permission))
    source = ParquetFiles.open(
        table, job.roles, job.hash, permission=permission, say=lambda _: None
    )
    if source.version != job.version:
        raise RemoteError(
            f"{source.uri}: other files than the loader has (version {source.version} here, "
            f"{job.version} there)"
        )
    return UnitMaker(job, source)


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def program() -> NoReturn:
    """Runs the whole program, as its command does."""
    run(main)


if __name__ == "__main__":
    program()
