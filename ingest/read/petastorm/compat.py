"""Makes Petastorm 0.12.1 and 0.13.1 run on today's Arrow and numpy, as far as Sluice uses it: `install`.

A dataset gets its files from a `VersionFiles` in place of a file system, so no folder is listed. It has no
`common_metadata`, which Petastorm would unpickle, because a dataset is not a trusted program. Nothing in site-packages
is edited. Datasets with another file system are opened as before.
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
"""The dataset that workers get. No file is read through it."""


@runtime_checkable
class VersionFiles(Protocol):
    """Takes the place of Petastorm's file system. It knows the files of one version and decodes their row groups."""

    row_groups: tuple[tuple[int, ...], ...]
    stored: pa.Schema

    def decoded(self, file: int, group: int) -> pa.Table: ...


class RowGroupPiece:
    """A Parquet file or one of its row groups. Has the parts of the removed ParquetDatasetPiece that Petastorm uses."""

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
        """Returns the footer's metadata. No footer is read if the table already has it."""
        if self._metadata is None:
            with self._open(self.path) as file:
                self._metadata = pq.read_metadata(file)
        return self._metadata

    def read(self, columns: Collection[str], partitions: Any = None) -> pa.Table:
        """Reads columns of the file and adds those that its folders' names hold."""
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
    """Has the parts of the removed ParquetDataset that Petastorm uses, for files from a `VersionFiles`."""

    partitions = metadata = common_metadata = None

    def __init__(self, paths: Sequence[str], files: VersionFiles):
        if isinstance(paths, str):
            raise TypeError(
                "give the files of a dataset as a list: a folder may hold files of no version"
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
    """Makes a dataset of the given files. Without a `VersionFiles`, makes Arrow's own dataset."""
    if isinstance(filesystem, VersionFiles):
        return Dataset(path_or_paths, filesystem)
    return pq.ParquetDataset(path_or_paths, filesystem=filesystem, **options)


def named(schema: pa.Schema) -> pa.Schema:
    """Replaces types that Petastorm does not know by similar ones. Values are still read in the file's own types."""
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
    """Today's numpy with the two type names that Petastorm uses and numpy has removed."""

    unicode_, string_ = np.str_, np.bytes_

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def install() -> None:
    """Makes `petastorm.reader` importable and gives it the replacements. A second call changes nothing."""
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
    """Restores the removed modules that Petastorm imports names from. Names that it never calls are empty classes."""
    for name, attributes in _REMOVED.items():
        if f"pyarrow.{name}" not in sys.modules:
            module = types.ModuleType(f"pyarrow.{name}")
            for attribute in attributes:
                setattr(module, attribute, known.get(attribute) or type(attribute, (), {}))
            sys.modules[f"pyarrow.{name}"] = module
            setattr(pa, name, module)


class PetastormLocalFiles:
    """Has the parts of the removed LocalFileSystem that Petastorm uses. It can be pickled by its class."""

    exists, isdir, isfile = (
        staticmethod(f) for f in (os.path.exists, os.path.isdir, os.path.isfile)
    )

    def open(self, path: str, mode: str = "rb") -> pa.NativeFile:
        # Petastorm leaves files open, and Python's own file class would warn about that.
        return pa.OSFile(path, mode)

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
    """Restores the removed local file system for the parts of Petastorm that open local files themselves."""
    restore_modules({"LocalFileSystem": PetastormLocalFiles})
    pa.LocalFileSystem, pa.localfs = PetastormLocalFiles, PetastormLocalFiles()
