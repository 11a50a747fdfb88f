"""Connects a pipeline to the remote workers that a user names: `remote_reads`."""

from __future__ import annotations

import os
from functools import partial
from urllib.parse import parse_qs

from sluice.common.errors import UsageError
from sluice.ingest.loader_input import LoaderInput
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.remote.client import RemoteClient
from sluice.ingest.remote.connection import Connection
from sluice.ingest.remote.credentials import read_file, read_token
from sluice.ingest.remote.fleet import Fleet, StartedFleet, started
from sluice.ingest.remote.maker import job_of
from sluice.ingest.remote.messages import RemoteError

_MOST = 256


def remote_reads(workers: str, given: LoaderInput) -> RemoteClient:
    """Makes what one loader reads by, from the text in `workers`."""
    reading = given.config.reading
    local_only = ""
    if reading.files is not None and reading.files.is_disturbed:
        local_only = "a store that is slow or faulty on purpose"
    elif reading.petastorm.predicate is not None or "TransformSpec" in given.code:
        local_only = "what Petastorm's Reader is asked for"
    if local_only:
        raise RemoteError(
            f"workers={workers!r}: {local_only} works only in this process; leave one of the two out"
        )
    source = given.table
    job = job_of(given)
    fleet_of = partial(
        StartedFleet,
        job=job,
        table=[file.path for file in source.files]
        if isinstance(source, ParquetFiles) and source.table is None
        else str(source.uri),
        functions=[
            str(function.code)
            for function in (*given.functions, *given.transforms)
            if function.sendable
        ],
    )
    fleet: Fleet
    kind, _, rest = workers.partition(":")
    if kind == "local":
        if not rest.isdigit() or not 1 <= int(rest) <= _MOST:
            raise RemoteError(
                f"workers={workers!r}: {rest!r} is not a number of workers from 1 to {_MOST}"
            )
        cores = len(os.sched_getaffinity(0))
        fleet = fleet_of(started, most=int(rest), first=int(rest), local=True, at_once=cores)
    elif workers.startswith("ray://"):
        from sluice.ingest.remote import on_ray

        cluster = on_ray.RayCluster(workers.removeprefix("ray://"))
        cluster.join()
        # The cores of other hosts start the workers.
        fleet = fleet_of(
            cluster.start, most=_MOST, first=1, local=False, at_once=_MOST, leave=cluster.close
        )
    else:
        fleet = Fleet(_connections(workers))
    return RemoteClient(fleet, job, given.groups)


def _connections(workers: str) -> list[Connection]:
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
        token = read_token(options["token"][0])
        authority = read_file(options["ca"][0]) if "ca" in options else None
    except UsageError as error:
        raise RemoteError(f"workers={workers!r}: {error}") from None
    return [Connection(address, token, authority=authority) for address in addresses]
