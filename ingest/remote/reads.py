"""Connects a pipeline to the remote workers that a user names: `remote_reads`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from sluice.ingest.columns import Columns
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.read.reader import RowGroupReader
from sluice.ingest.remote.asking import Asking
from sluice.ingest.remote.client import Connection
from sluice.ingest.remote.fleet import Fleet, StartedFleet, started
from sluice.ingest.remote.maker import job_of
from sluice.ingest.remote.unit import RemoteError, RemoteJob
from sluice.ingest.row_order import RowsPlan

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

_MOST = 256


def remote_reads(
    workers: str,
    source: FeatureTable | ParquetFiles,
    *,
    plan: RowsPlan,
    split: str,
    columns: Columns,
    reader: str,
    sample: str | None,
    groups: RowGroupReader,
    local_only: Mapping[str, Any],
    rank: str,
    functions: Sequence[str],
) -> Asking:
    """Makes what one loader reads by, from the text in `workers`. Remote workers cannot do what is in `local_only`, and
    can call the `functions`. A loader's `rank` says which rows of a job it wants."""
    for what, given in local_only.items():
        if given:
            raise RemoteError(
                f"workers={workers!r}: {what} works only in this process; leave one of the two out"
            )
    job = job_of(source, plan=plan, split=split, columns=columns, reader=reader, sample=sample)
    kind, _, rest = workers.partition(":")
    table = (
        [file.path for file in source.files]
        if isinstance(source, ParquetFiles)
        else str(source.uri)
    )
    if kind == "local":
        if not rest.isdigit() or not 1 <= int(rest) <= _MOST:
            raise RemoteError(
                f"workers={workers!r}: {rest!r} is not a number of workers from 1 to {_MOST}"
            )
        return Asking(
            StartedFleet(
                started,
                job,
                table,
                functions,
                most=int(rest),
                first=int(rest),
                local=True,
                at_once=len(os.sched_getaffinity(0)),
            ),
            groups,
        )
    if workers.startswith("ray://"):
        from sluice.ingest.remote import on_ray

        cluster = on_ray.RayCluster(workers.removeprefix("ray://"))
        cluster.join()
        return Asking(
            StartedFleet(
                cluster.start,
                job,
                table,
                functions,
                most=_MOST,
                first=1,
                local=False,
                at_once=_MOST,  # the cores of other hosts start them
                leave=cluster.close,
            ),
            groups,
        )
    return Asking(Fleet(_connections(workers, job, (rank, secrets.token_hex(8)))), groups)


def _connections(workers: str, job: RemoteJob, asker: tuple[str, str]) -> list[Connection]:
    """Makes the connections for `HOST:PORT,…?token=FILE[&ca=FILE]`."""
    named, _, query = workers.partition("?")
    addresses, options = named.split(","), parse_qs(query)
    if "token" not in options or options.keys() - {"token", "ca"}:
        raise RemoteError(
            f"workers={workers!r}: write local:4, ray://HOST:PORT, or HOST:PORT,HOST:PORT?token=FILE, "
            "with &ca=FILE for TLS"
        )
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise RemoteError(f"workers={workers!r}: {address!r} is neither HOST:PORT nor local:N")
    try:
        token = Path(options["token"][0]).read_text("utf-8").strip()
        authority = Path(options["ca"][0]).read_bytes() if "ca" in options else None
    except OSError as error:
        raise RemoteError(f"workers={workers!r}: {error.filename}: {error.strerror}") from None
    return [
        Connection(address, token, job, authority=authority, asker=asker) for address in addresses
    ]
