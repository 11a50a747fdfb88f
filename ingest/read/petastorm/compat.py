"""Lets Petastorm 0.12.1 and 0.13.1 run on today's Arrow and numpy, as far as the product uses it: `install`.

A dataset is *given* its files by what Petastorm's Reader takes for its file system; nothing lists a folder. It has no
`common_metadata`, which Petastorm would unpickle: a dataset is not a trusted program. Nothing in site-packages is
edited, and datasets that are no `VersionFiles` are opened as before (`sluice.ingest.read.petastorm_folders`).
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_REMOVED = {
    "filesystem": ("LocalFileSystem", "S3FSWrapper", "FileSystem"),
    "hdfs": ("HadoopFileSystem", "connect"),
}
_lock = threading.Lock()
GIVEN = types.SimpleNamespace(partitions=None, fs=types.SimpleNamespace(open=lambda _path: None))
"""What a worker asks of a dataset whose files are given: nobody reads a file through it."""


@runtime_checkable
class VersionFiles(Protocol):
    """What Petastorm gets in place of a file system: it knows the files of one version, and decodes their row
    groups."""

    row_groups: tuple[tuple[int, ...], ...]
    stored: pa.Schema

    def decoded(self, file: int, group: int) -> pa.Table: ...


class RowGroupPiece:
    """A Parquet file, or one row group of it: what Petastorm uses of the removed ParquetDatasetPiece."""

    def __init__(
        self,
        path: str,
        open_file_func: Any = None,
        row_group: int | None = None,
        partition_keys: Sequence[Any] = (),
        metadata: Any = None,
    ):
        self.path = path
        self.row_group = row_group
        self.partition_keys = list(partition_keys)
        self._open, self._metadata = open_file_func, metadata

    def get_metadata(self) -> Any:
        """Returns what Petastorm asks of a footer; if the table knows it, no footer is read."""
        if self._metadata is None:
            with self._open(self.path) as file:
                self._metadata = pq.read_metadata(file)
        return self._metadata

    def read(self, columns: Collection[str], partitions: Any = None) -> pa.Table:
        """Reads the columns that the file has, and adds what its folders say."""
        with self._open(self.path) as opened:
            file = pq.ParquetFile(opened)
            names = list(columns)
            table = (
                file.read(names)
                if self.row_group is None
                else file.read_row_group(self.row_group, names)
            )
        for name, at in self.partition_keys if partitions else ():
            values = next(p.dictionary for p in partitions or () if p.name == name)
            indices = pa.array(np.full(len(table), at, np.int32))
            table = table.append_column(name, pa.DictionaryArray.from_arrays(indices, values))
        return table


class Dataset:
    """What Petastorm uses of the removed ParquetDataset, for files that are given."""

    partitions = metadata = common_metadata = None

    def __init__(self, paths: Sequence[str], files: VersionFiles):
        if isinstance(paths, str):
            raise TypeError(
                "the files of a dataset are given as a list: a folder may hold files of no version"
            )
        self.fs, self.paths = GIVEN.fs, list(paths)
        known = named(files.stored)
        schema = types.SimpleNamespace(to_arrow_schema=lambda: known)
        self.pieces = [
            RowGroupPiece(
                path, metadata=types.SimpleNamespace(num_row_groups=len(counts), schema=schema)
            )
            for path, counts in zip(self.paths, files.row_groups, strict=True)
        ]


def dataset(path_or_paths: Any, filesystem: Any = None, **options: Any) -> Any:
    """The dataset of files that are given, or, where Arrow has got its own back, that one."""
    if isinstance(filesystem, VersionFiles):
        return Dataset(path_or_paths, filesystem)
    return pq.ParquetDataset(path_or_paths, filesystem=filesystem, **options)


def named(schema: pa.Schema) -> pa.Schema:
    """The schema in types that Petastorm has a name for. What is read has the file's own types."""
    return pa.schema([f.with_type(_named(f.type)) for f in schema])


def _named(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_named(kind.value_type))
    if pa.types.is_unsigned_integer(kind) and kind != pa.uint8():
        return pa.int32() if kind == pa.uint16() else pa.int64()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_large_string(kind) or pa.types.is_dictionary(kind):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(kind) else kind


class _Numpy(types.ModuleType):
    """Today's numpy, with the names that Petastorm knows two types by."""

    unicode_, string_ = np.str_, np.bytes_

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def install() -> None:
    """Makes `petastorm.reader` importable and points it to the stand-ins. Doing it twice changes nothing."""
    with _lock:
        restore_modules({})
        import petastorm.arrow_reader_worker
        import petastorm.etl.dataset_metadata
        import petastorm.reader
        import petastorm.unischema

        worker, numpy = petastorm.arrow_reader_worker, _Numpy("numpy")
        kept = {name: getattr(pq, name) for name in ("ParquetFile", "read_schema", "read_metadata")}
        legacy = types.SimpleNamespace(
            **kept, ParquetDataset=dataset, ParquetDatasetPiece=RowGroupPiece
        )
        petastorm.reader.pq = petastorm.etl.dataset_metadata.pq = worker.pq = legacy
        worker.ParquetFile = lambda opened: None if opened is None else pq.ParquetFile(opened)
        worker.np = petastorm.unischema.np = numpy


def restore_modules(known: Mapping[str, type]) -> None:
    """Restores the modules that Petastorm imports names from. Names that nobody calls are empty classes."""
    for name, attributes in _REMOVED.items():
        if f"pyarrow.{name}" not in sys.modules:
            module = types.ModuleType(f"pyarrow.{name}")
            for attribute in attributes:
                setattr(module, attribute, known.get(attribute) or type(attribute, (), {}))
            sys.modules[f"pyarrow.{name}"] = module
            setattr(pa, name, module)


class PetastormLocalFiles:
    """What Petastorm uses of the removed LocalFileSystem. It is sent to other processes by its class."""

    exists, isdir, isfile = (
        staticmethod(f) for f in (os.path.exists, os.path.isdir, os.path.isfile)
    )

    def open(self, path: str, mode: str = "rb") -> pa.NativeFile:
        return pa.OSFile(
            path, mode
        )  # Petastorm leaves files open, of which Python's own file class would warn

    def ls(self, path: str, detail: bool = False) -> list[Any]:
        with os.scandir(path) as entries:
            return [
                {"name": e.path, "type": "directory" if e.is_dir() else "file"}
                if detail
                else e.path
                for e in entries
            ]

    def rm(self, path: str, recursive: bool = False) -> None:
        if recursive and os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.remove(path)

    delete = rm


def install_local_files() -> None:
    """Gives Petastorm's parts that open local files by themselves the removed file system back."""
    restore_modules({"LocalFileSystem": PetastormLocalFiles})
    pa.LocalFileSystem, pa.localfs = PetastormLocalFiles, PetastormLocalFiles()
