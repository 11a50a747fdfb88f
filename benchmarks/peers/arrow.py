"""What a careful user of pyarrow writes for any framework: a row group read, its columns shuffled into two blocks."""

from __future__ import annotations

import functools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from benchmarks.peers.serve import Job


def blocks_of(table: pa.Table, job: Job, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in `order`: [rows, floats] and [rows, ids]; column by column underneath, which is eight times as fast."""
    return _block(table, job.floats, np.float32, order), _block(table, job.ids, np.int32, order)


def _block(table: pa.Table, names: tuple[str, ...], kind: type, order: np.ndarray) -> np.ndarray:
    block = np.empty((len(names), len(order)), kind)
    for row, name in enumerate(names):
        np.take(table[name].to_numpy().astype(kind, copy=False), order, out=block[row], mode="clip")
    return block.T


@functools.cache
def opened(job: Job, path: str) -> tuple[pa.NativeFile | str, pq.FileMetaData]:
    """A file and its footer, which are asked for once: a far store takes long for each request."""
    file = store_of(job).open_input_file(path) if job.store else path
    return file, pq.read_metadata(file)


@functools.cache
def store_of(job: Job) -> fs.FileSystem:
    return fs.S3FileSystem(endpoint_override=job.store, scheme="http", region="us-east-1")


def read(
    job: Job, path: str, group: int, random: np.random.Generator, threads: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A row group's rows in random order: floats, ids and texts. With `threads`, Arrow decodes with its own."""
    file, footer = opened(job, path)
    table = pq.ParquetFile(
        file, metadata=footer, page_checksum_verification=True, pre_buffer=bool(job.store)
    ).read_row_group(group, columns=job.columns, use_threads=threads)
    order = random.permutation(table.num_rows)
    return *blocks_of(table, job, order), texts_of(table, job, order)


def texts_of(table: pa.Table, job: Job, order: np.ndarray) -> np.ndarray:
    """Empty texts if the job takes none."""
    return table[job.texts].to_numpy()[order] if job.texts else np.full(len(order), b"", object)
