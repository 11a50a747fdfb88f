"""Connects a pipeline to the remote workers that a user names: `remote_reads`."""

from __future__ import annotations

import os
from functools import partial

from sluice.ingest.loader_input import LoaderInput
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.remote.asking import Asking
from sluice.ingest.remote.fleet import Fleet, started
from sluice.ingest.remote.maker import job_of
from sluice.ingest.remote.unit import RemoteError

_MOST = 256


def remote_reads(workers: str, given: LoaderInput) -> Asking:
    """Makes what one loader reads by, from the text in `workers`."""
    reading = given.config.reading
    local_only = {
        "a store that is slow or faulty on purpose": reading.files is not None
        and reading.files.is_disturbed,
        "what Petastorm's Reader is asked for": reading.petastorm.predicate is not None
        or "TransformSpec" in given.code,
    }
    for what, wanted in local_only.items():
        if wanted:
            raise RemoteError(
                f"workers={workers!r}: {what} works only in this process; leave one of the two out"
            )
    source = given.table
    job = job_of(given)
    fleet_of = partial(
        Fleet,
        job=job,
        table=[file.path for file in source.files]
        if isinstance(source, ParquetFiles) and source.table is None
        else str(source.uri),
        functions=[str(one.code) for one in (*given.functions, *given.transforms) if one.sendable],
    )
    kind, _, rest = workers.partition(":")
    if kind == "local":
        if not rest.isdigit() or not 1 <= int(rest) <= _MOST:
            raise RemoteError(
                f"workers={workers!r}: {rest!r} is not a number of workers from 1 to {_MOST}"
            )
        cores = len(os.sched_getaffinity(0))
        fleet = fleet_of(started, most=int(rest), first=int(rest), local=True, at_once=cores)
    elif kind == "ray":
        from sluice.ingest.remote import on_ray

        cluster = on_ray.RayCluster(rest.removeprefix("//"))
        cluster.join()
        # The cores of other hosts start the workers.
        fleet = fleet_of(
            cluster.start, most=_MOST, first=1, local=False, at_once=_MOST, leave=cluster.close
        )
    else:
        raise RemoteError(
            f"workers={workers!r}: write local:4, or ray://HOST:PORT for workers on other hosts (a Ray cluster starts "
            "them there: `ray start --address=HOST:PORT` on each)"
        )
    return Asking(fleet, given.groups)
