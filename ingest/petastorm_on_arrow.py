"""Lets Petastorm 0.13.1 run on today's Arrow: stands in for two modules and a class that Arrow has removed.

`install()` is all. The dataset class is *given* its files by what the Reader takes for its file system (it never
lists a folder), and has no `common_metadata`: Petastorm would unpickle what lies there, and a dataset is not a
trusted program. Nothing in site-packages is edited.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

_REMOVED = {"filesystem": ("LocalFileSystem", "S3FSWrapper", "FileSystem"), "hdfs": ("HadoopFileSystem", "connect")}
_lock = threading.Lock()


class Files(Protocol):
    """What stands where Petastorm expects a file system: it knows the files of one version."""

    row_groups: tuple[tuple[int, ...], ...]
    schema: pa.Schema


class Piece:
    """A Parquet file, or one row group of it: what Petastorm uses of the removed ParquetDatasetPiece."""

    def __init__(self, path: str, open_file_func: Any = None, row_group: int | None = None,
                 partition_keys: Sequence[Any] = (), metadata: Any = None):
        self.path, self.row_group, self.partition_keys = path, row_group, list(partition_keys)
        self._metadata = metadata

    def get_metadata(self) -> Any:
        """What Petastorm asks of a footer; the table knows, so none is read."""
        return self._metadata


class Dataset:
    """What Petastorm uses of the removed ParquetDataset."""

    partitions = metadata = common_metadata = None

    def __init__(self, path_or_paths: Sequence[str], filesystem: Files, **_legacy: Any):
        if isinstance(path_or_paths, str):
            raise TypeError("the files of a dataset are given as a list: a folder may hold files of no version")
        self.fs = types.SimpleNamespace(open=None)  # nobody opens a file through it
        self.paths = list(path_or_paths)
        known = _known(filesystem.schema)
        schema = types.SimpleNamespace(to_arrow_schema=lambda: known)
        self.pieces = [Piece(path, metadata=types.SimpleNamespace(num_row_groups=len(counts), schema=schema))
                       for path, counts in zip(self.paths, filesystem.row_groups, strict=True)]


def _known(schema: pa.Schema) -> pa.Schema:
    """As Petastorm can say it on today's numpy, where its name for bytes is gone: bags in bytes are lists to it."""
    bytes_like = (pa.types.is_binary, pa.types.is_large_binary)
    return pa.schema([f.with_type(pa.list_(pa.int32())) if any(known(f.type) for known in bytes_like) else f
                      for f in schema])


def install() -> None:
    """Makes `petastorm.reader` importable and points it to the stand-ins. Doing it twice changes nothing."""
    with _lock:
        for name, attributes in _REMOVED.items():
            if f"pyarrow.{name}" not in sys.modules:
                module = types.ModuleType(f"pyarrow.{name}")
                for attribute in attributes:
                    setattr(module, attribute, type(attribute, (), {}))
                sys.modules[f"pyarrow.{name}"] = module
                setattr(pa, name, module)
        import petastorm.etl.dataset_metadata
        import petastorm.reader

        kept = {name: getattr(pq, name) for name in ("ParquetFile", "read_schema", "read_metadata")}
        legacy = types.SimpleNamespace(**kept, ParquetDataset=Dataset, ParquetDatasetPiece=Piece)
        petastorm.reader.pq = petastorm.etl.dataset_metadata.pq = legacy
