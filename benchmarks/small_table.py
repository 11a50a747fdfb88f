"""Makes a real feature table of synthetic clicks in a second, without Spark, for tests and first tries: `small_table`.

It is written with pyarrow and published by the same commit code as a job's; its labels can be learned.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from sluice.etl.schema import Field
from sluice.etl.synth.criteo import CATEGORIES, INTEGERS, Clicks, SyntheticRows
from sluice.etl.table.commit import Base, new_job, publish
from sluice.etl.table.data_files import arrow_schema
from sluice.etl.table.job_record import JobRecord
from sluice.etl.table.new_files import write_file
from sluice.etl.table.profile import Profile
from sluice.etl.table.store import TableStore, folder_of
from sluice.etl.table.table import FeatureTable

SPLITS = {"train": 0.8, "validation": 0.1, "test": 0.1}
_FIRST_ID = 3  # 0 padding, 1 null, 2 out of vocabulary


def small_table(
    path: str | os.PathLike[str],
    *,
    rows: int = 10_000,
    seed: int = 0,
    files: int = 4,
    row_group_rows: int = 1024,
    splits: Mapping[str, float] | None = None,
    values: int = 1000,
    mode: str = "create",
    first: int = 0,
    number_rows: bool = False,
) -> FeatureTable:
    """Writes `rows` clicks, of which `values` per category have an id, and returns the new version.

    `files` is the number of training files; other splits have a proportionate number. `first` continues an earlier
    table's rows. With `number_rows`, I1 holds each row's number, so that a test can tell rows apart."""
    store, job = TableStore(path), new_job()
    base = Base.read(store)
    base.permit(mode, store.uri)
    clicks = Clicks(seed).rows(first, rows)
    fields = (
        Field(name="label", role="label", type="int8"),
        *(Field(name=n, role="dense", type="float") for n in INTEGERS),
        *(
            Field(name=n, role="sparse", type="int32", cardinality=values + _FIRST_ID, width=16)
            for n in CATEGORIES
        ),
    )
    table = _features(clicks, values, number_rows).cast(arrow_schema(fields))
    splits = dict(SPLITS if splits is None else splits)
    start, made_files = 0, []
    for number, (split, share) in enumerate(splits.items()):
        stop = rows if number == len(splits) - 1 else start + round(share * rows)
        count = max(1, math.ceil(files * share / max(splits.values())))
        bounds = np.linspace(start, stop, count + 1).astype(int)
        for part in range(count):
            piece = table.slice(bounds[part], bounds[part + 1] - bounds[part])
            groups = (
                piece[row : row + row_group_rows] for row in range(0, len(piece), row_group_rows)
            )
            path = f"{folder_of(job)}/split={split}/part-{part:05}.parquet"
            made_files.append(write_file(store, path, groups, fields, split=split))
        start = stop
    written = tuple(file.record for file in made_files)
    profile = Profile.joined(file.profile for file in made_files)
    record = JobRecord(
        job=job,
        mode=mode,
        version=base.next,
        at=f"{datetime.datetime.now(datetime.UTC):%FT%TZ}",
        rows=sum(f.rows for f in written),
        state=None,
        parent=None,
        spec="",
        seed=seed,
        files=written,
        cardinalities=dict.fromkeys(CATEGORIES, values + _FIRST_ID),
        profile=profile.columns,
    )
    return FeatureTable.open(store.uri, publish(store, base, record, fields))


def _features(clicks: SyntheticRows, values: int, number_rows: bool) -> pa.Table:
    columns: dict[str, np.ndarray] = {"label": clicks.label}
    for name in INTEGERS:
        dense = np.log(clicks.counts[name] + 3.0)
        dense[clicks.nulls.get(name, np.zeros(len(clicks), bool))] = 0.0
        columns[name] = dense.astype(np.float32)
    if number_rows:
        columns["I1"] = np.arange(clicks.first, clicks.first + len(clicks), dtype=np.float32)
    for name in CATEGORIES:
        rank = clicks.ranks[name]
        ids = np.where(rank < values, rank + _FIRST_ID, _FIRST_ID - 1)
        ids[clicks.nulls.get(name, np.zeros(len(clicks), bool))] = 1
        columns[name] = ids.astype(np.int32)
    return pa.table(columns)
