"""Gives Petastorm's public readers what they had on old Arrow: folders, partitions and metadata. For Petastorm's own
tests (`tests/petastorm_own.py`): `compat` changes the whole process, and the product never calls it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.ingest.read.petastorm.compat import install_local_files


def compat() -> None:
    """Gives this process the removed parts of Arrow back, and the removed names of numpy that Petastorm uses. Petastorm
    then unpickles what a dataset's `_common_metadata` holds, which can run any program."""
    install_local_files()
    pa.lib.ArrowIOError = OSError
    pq.ParquetDataset, pq.ParquetDatasetPiece, pq.PartitionSet = Folder, RowGroupPiece, Partition
    for name, now in {
        "unicode_": np.str_,
        "string_": np.bytes_,
        "float": float,
        "in1d": np.isin,
    }.items():
        setattr(np, name, now)


@dataclass
class RowGroupPiece:
    """The removed ParquetDatasetPiece of a file or of one of its row groups, as far as Petastorm uses it."""

    path: str
    open_file_func: Callable[[str], Any]
    row_group: int | None = None
    partition_keys: Sequence[Any] = ()

    def get_metadata(self) -> Any:
        with self.open_file_func(self.path) as file:
            return pq.read_metadata(file)

    def read(self, columns: Collection[str], partitions: Any = None) -> pa.Table:
        """Reads columns of the file and adds those that its folders' names hold."""
        with self.open_file_func(self.path) as opened:
            file, names = pq.ParquetFile(opened), list(columns)
            groups = range(file.num_row_groups) if self.row_group is None else [self.row_group]
            table = file.read_row_groups(groups, names)
        for name, at in self.partition_keys if partitions else ():
            values = next(p.dictionary for p in partitions or () if p.name == name)
            indices = pa.array(np.full(len(table), at, np.int32))
            table = table.append_column(name, pa.DictionaryArray.from_arrays(indices, values))
        return table


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
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "in": lambda value, among: value in among,
    "not in": lambda value, among: value not in among,
}


class Folder:
    """The removed ParquetDataset of a folder, a file or a list of files, as far as Petastorm uses it."""

    def __init__(
        self,
        path_or_paths: str | Sequence[str],
        filesystem: Any = None,
        filters: Any = None,
        **_legacy: Any,
    ):
        self.fs = filesystem or pa.localfs
        self.paths = path_or_paths
        self.metadata_path = self.common_metadata_path = None
        self.partitions: Partitions | None = None
        found: list[tuple[str, list[tuple[str, str]]]] = []
        only = (
            path_or_paths
            if isinstance(path_or_paths, str)
            else path_or_paths[0]
            if len(path_or_paths) == 1
            else ""
        )
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
        self.pieces = [
            RowGroupPiece(
                path, self.fs.open, partition_keys=[(name, at[name](key)) for name, key in keys]
            )
            for path, keys in found
            if _included(dict(keys), filters)
        ]
        self.metadata = self._footer(self.metadata_path)
        self.common_metadata = self._footer(self.common_metadata_path) or self.metadata

    def _walk(
        self, folder: str, keys: tuple[tuple[str, str], ...] = ()
    ) -> list[tuple[str, list[tuple[str, str]]]]:
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
