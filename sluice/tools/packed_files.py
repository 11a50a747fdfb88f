"""Writes the rows of Parquet files in the layout that a loader reads fastest: `pack`."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.errors import UsageError
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.table.data_files import METADATA_KEY
from sluice.etl.table.new_files import speed_layout
from sluice.etl.table.table_columns import FileColumns, TableParquet
from sluice.ingest.plain.footer_chunks import check_file
from sluice.ingest.plain.roles import ParquetError
from sluice.ingest.read.source_files import find_files, is_table


def pack(source: str, target: str) -> dict[str, int]:
    """Writes the rows of `source` to the new folder `target`. Returns the numbers of files, rows and bytes."""
    out = Path(target)
    if "://" in target or os.path.lexists(out):
        raise UsageError(f"{target}: OUT is a folder of this machine that does not exist yet")
    files = None if is_table(source) and "://" not in source else find_files(source)
    columns = files.table.schema if files and files.table else ()
    if files is None or any(METADATA_KEY in (f.metadata or {}) for f in columns):
        raise UsageError(
            f'{source}: is a feature table. With layout = "speed" in [table] of its spec, '
            "`sluice etl --mode overwrite` writes it in this layout"
        )
    names = [f.name for f in columns]
    draft = out.absolute().with_name(f".{out.name}.{uuid.uuid4().hex}")
    progress, done = JobProgress(sys.stderr), Counter[str](rows=0)
    progress.follow(lambda: f"{done['files']} of {len(files.paths)} files, {done['rows']:,} rows,")
    try:
        draft.mkdir(parents=True)
        with progress.stage(f"packing {files.uri}"):
            for number, (path, located) in enumerate(files.located(None).items()):
                file, groups = draft / f"part-{number:08}.parquet", _read(path, located, names)
                first = next(groups)
                with pq.ParquetWriter(file, first.schema, **speed_layout(first)) as writer:
                    for rows in chain([first], groups):
                        writer.write_table(rows, row_group_size=max(1, len(rows)))
                        done["rows"] += len(rows)
                done.update(files=1, bytes=file.stat().st_size)
        os.rename(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return dict(done)


def _read(path: str, located: FileColumns, names: Sequence[str]) -> Iterator[pa.Table]:
    """Yields a file's row groups, or one without rows. With `names`, columns have this order."""
    try:
        with TableParquet(path, located) as file:
            check_file(path, file.metadata, ParquetError)
            own = file.schema_arrow.names
            for name, count in Counter(own).items():
                if count > 1:
                    raise ParquetError(
                        f"{path}: {count} columns are called {name!r}, in the file or in the names of its folders; "
                        "rename all but one of them"
                    )
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, own).select(names or own)
            if not file.num_row_groups:
                yield file.schema_arrow.empty_table().select(names or own)
    except (OSError, pa.ArrowException) as error:
        raise ParquetError(f"{path}: {error}; the file is damaged, so make it again") from error
