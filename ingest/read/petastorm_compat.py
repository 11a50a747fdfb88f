"""Lets Petastorm 0.13.1 run on today's Arrow: stands in for what Arrow has removed. It needs no other module of Sluice.

`install()` is the product's mode. The dataset class is *given* its files by what the Reader takes for its file system
(it never lists a folder), and has no `common_metadata`: Petastorm would unpickle what lies there, and a dataset is not
a trusted program.

`compat(trust=True)` is for Petastorm's own tests: its public readers open folders, partitions and metadata as they did
on old Arrow, and therefore unpickle what they find. It changes the whole process, and is never called by the product.

Nothing in site-packages is edited.
"""

from __future__ import annotations

import operator
import os
import shutil
import sys
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_REMOVED = {"filesystem": ("LocalFileSystem", "S3FSWrapper", "FileSystem"), "hdfs": ("HadoopFileSystem", "connect")}
_lock = threading.Lock()


class VersionFiles(Protocol):
    """What Petastorm gets in place of a file system: it knows the files of one version."""

    row_groups: tuple[tuple[int, ...], ...]
    schema: pa.Schema


class RowGroupPiece:
    """A Parquet file, or one row group of it: what Petastorm uses of the removed ParquetDatasetPiece."""

    def __init__(self, path: str, open_file_func: Any = None, row_group: int | None = None,
                 partition_keys: Sequence[Any] = (), metadata: Any = None):
        self.path, self.row_group, self.partition_keys = path, row_group, list(partition_keys)
        self._open, self._metadata = open_file_func, metadata

    def get_metadata(self) -> Any:
        """Returns what Petastorm asks of a footer; if the table knows it, no footer is read."""
        if self._metadata is None:
            with self._open(self.path) as file:
                self._metadata = pq.read_metadata(file)
        return self._metadata

    def read(self, columns: Collection[str], partitions: Partitions | None = None) -> pa.Table:
        """Reads the columns that the file has, and adds what its folders say."""
        with self._open(self.path) as opened:
            file = pq.ParquetFile(opened)
            names = list(columns)
            table = file.read(names) if self.row_group is None else file.read_row_group(self.row_group, names)
        for name, at in self.partition_keys if partitions else ():
            values = next(p.dictionary for p in partitions or () if p.name == name)
            indices = pa.array(np.full(len(table), at, np.int32))
            table = table.append_column(name, pa.DictionaryArray.from_arrays(indices, values))
        return table


class Dataset:
    """What Petastorm uses of the removed ParquetDataset."""

    partitions = metadata = common_metadata = None

    def __init__(self, path_or_paths: Sequence[str], filesystem: VersionFiles, **_legacy: Any):
        if isinstance(path_or_paths, str):
            raise TypeError("the files of a dataset are given as a list: a folder may hold files of no version")
        self.fs = types.SimpleNamespace(open=None)  # nobody opens a file through it
        self.paths = list(path_or_paths)
        known = _known(filesystem.schema)
        schema = types.SimpleNamespace(to_arrow_schema=lambda: known)
        self.pieces = [RowGroupPiece(path, metadata=types.SimpleNamespace(num_row_groups=len(counts), schema=schema))
                       for path, counts in zip(self.paths, filesystem.row_groups, strict=True)]


def _known(schema: pa.Schema) -> pa.Schema:
    """The schema in terms that Petastorm knows: it has no name for bytes and texts (on today's numpy), for whole
    numbers without a sign, for half floats and for large lists. What is read has the file's own types."""
    return pa.schema([f.with_type(_known_type(f.type)) for f in schema])


def _known_type(kind: pa.DataType) -> pa.DataType:
    unknown = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_list, pa.types.is_large_list,
               pa.types.is_string)
    if any(is_one(kind) for is_one in unknown):
        return pa.list_(pa.int32())
    if pa.types.is_unsigned_integer(kind):
        return pa.int64()
    return pa.float32() if pa.types.is_float16(kind) else kind


def install() -> None:
    """Makes `petastorm.reader` importable and points it to the stand-ins. Doing it twice changes nothing."""
    with _lock:
        _restore_modules({})
        import petastorm.etl.dataset_metadata
        import petastorm.reader

        kept = {name: getattr(pq, name) for name in ("ParquetFile", "read_schema", "read_metadata")}
        legacy = types.SimpleNamespace(**kept, ParquetDataset=Dataset, ParquetDatasetPiece=RowGroupPiece)
        petastorm.reader.pq = petastorm.etl.dataset_metadata.pq = legacy


def _restore_modules(known: Mapping[str, type]) -> None:
    """Restores the modules that Petastorm imports names from. Names that nobody calls are empty classes."""
    for name, attributes in _REMOVED.items():
        if f"pyarrow.{name}" not in sys.modules:
            module = types.ModuleType(f"pyarrow.{name}")
            for attribute in attributes:
                setattr(module, attribute, known.get(attribute) or type(attribute, (), {}))
            sys.modules[f"pyarrow.{name}"] = module
            setattr(pa, name, module)


# ---- for Petastorm's own tests

def compat(*, trust: bool = False) -> None:
    """Gives this process the removed parts of Arrow back, and the removed names of numpy that Petastorm uses. Refuses
    without `trust`: Petastorm then unpickles what a dataset's `_common_metadata` holds, which can run any program."""
    if not trust:
        raise PermissionError("compat() has Petastorm unpickle what a dataset's _common_metadata holds, which can run "
                              "any program: compat(trust=True) for datasets that you made yourself; to read others, "
                              "take ingest.Loader, which unpickles nothing")
    with _lock:
        _restore_modules({"LocalFileSystem": PetastormLocalFiles})
        pa.LocalFileSystem, pa.localfs = PetastormLocalFiles, PetastormLocalFiles()
        pa.lib.ArrowIOError = OSError
        pq.ParquetDataset, pq.ParquetDatasetPiece, pq.PartitionSet = Folder, RowGroupPiece, Partition
        for name, now in {"unicode_": np.str_, "string_": np.bytes_, "float": float, "in1d": np.isin}.items():
            setattr(np, name, now)


class PetastormLocalFiles:
    """What Petastorm uses of the removed LocalFileSystem. It is sent to other processes by its class."""

    exists, isdir, isfile = (staticmethod(f) for f in (os.path.exists, os.path.isdir, os.path.isfile))

    def open(self, path: str, mode: str = "rb") -> pa.NativeFile:
        return pa.OSFile(path, mode)  # Petastorm leaves files open, of which Python's own file class would warn

    def ls(self, path: str, detail: bool = False) -> list[Any]:
        with os.scandir(path) as entries:
            return [{"name": e.path, "type": "directory" if e.is_dir() else "file"} if detail else e.path
                    for e in entries]

    def rm(self, path: str, recursive: bool = False) -> None:
        if recursive and os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.remove(path)

    delete = rm


class Partition(NamedTuple):
    """A level of folders `name=key`: what Petastorm uses of the removed PartitionSet."""

    name: str
    keys: Sequence[str]

    @property
    def dictionary(self) -> pa.Array:
        """The keys; whole numbers, if all of them are."""
        try:
            return pa.array([int(key) for key in self.keys], pa.int64())
        except ValueError:
            return pa.array(self.keys)


class Partitions(list[Partition]):
    """All levels of a folder, from the outermost in: what Petastorm uses of the removed ParquetPartitions."""

    @property
    def partition_names(self) -> set[str]:
        return {level.name for level in self}


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le,
    ">=": operator.ge, "in": lambda value, among: value in among, "not in": lambda value, among: value not in among}


class Folder:
    """The removed ParquetDataset of a folder, a file or a list of files, as far as Petastorm uses it."""

    def __init__(self, path_or_paths: str | Sequence[str], filesystem: Any = None, filters: Any = None,
                 **_legacy: Any):
        self.fs = filesystem or pa.localfs
        self.paths = path_or_paths
        self.metadata_path = self.common_metadata_path = None
        self.partitions: Partitions | None = None
        found: list[tuple[str, list[tuple[str, str]]]] = []
        only = path_or_paths if isinstance(path_or_paths, str) else path_or_paths[0] if len(path_or_paths) == 1 else ""
        if only and self.fs.isdir(only):
            found = self._walk(only)
            levels: dict[str, list[str]] = {}
            for _, keys in found:
                for name, key in keys:
                    if key not in levels.setdefault(name, []):
                        levels[name].append(key)
            self.partitions = Partitions(Partition(name, keys) for name, keys in levels.items())
        else:
            paths = [path_or_paths] if isinstance(path_or_paths, str) else path_or_paths
            for path in paths:
                if not self.fs.isfile(path):
                    raise OSError(f"no such Parquet file or folder: {path}")
                found.append((path, []))
        at = {level.name: level.keys.index for level in self.partitions or ()}
        self.pieces = [RowGroupPiece(path, self.fs.open, partition_keys=[(name, at[name](key)) for name, key in keys])
                       for path, keys in found if _included(dict(keys), filters)]
        self.metadata = self._footer(self.metadata_path)
        self.common_metadata = self._footer(self.common_metadata_path) or self.metadata

    def _walk(self, folder: str, keys: tuple[tuple[str, str], ...] = ()) -> list[tuple[str, list[tuple[str, str]]]]:
        """Yields files with the keys of the folders that they are in; hidden names are metadata or nothing."""
        found = []
        for entry in sorted(self.fs.ls(folder, detail=True), key=lambda e: str(e["name"])):
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if name == "_metadata":
                self.metadata_path = entry["name"]
            elif name == "_common_metadata":
                self.common_metadata_path = entry["name"]
            elif not name.startswith(("_", ".")) and entry["type"] == "directory":
                level, is_key, key = name.partition("=")
                found += self._walk(entry["name"], (*keys, (level, key)) if is_key else keys)
            elif not name.startswith(("_", ".")):
                found.append((entry["name"], list(keys)))
        return found

    def _footer(self, path: str | None) -> pq.FileMetaData | None:
        if path is None:
            return None
        with self.fs.open(path) as file:
            return pq.read_metadata(file)


def _included(keys: Mapping[str, str], filters: Any) -> bool:
    """Whether the folders of a file pass the filters: any of some lists of conditions, or all of one list."""
    if not filters:
        return True
    either = filters if isinstance(filters[0], list) else [filters]

    def holds(name: str, compare: str, wanted: Any) -> bool:
        if name not in keys:
            return True
        kind = type(next(iter(wanted)) if compare.endswith("in") else wanted)
        return _COMPARE[compare](kind(keys[name]), wanted)

    return any(all(holds(*condition) for condition in all_of) for all_of in either)
