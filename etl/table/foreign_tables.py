"""`TableFinder` finds the table whose folder holds a data file, so that readers skip files that the table has removed.

A table of Delta, Iceberg or Hudi lists its current files in a log. A removed file stays in the folder for days.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

from sluice.common.errors import InputError
from sluice.etl.table.table_files import TableFiles

_KINDS = {"_sluice": "feature", "_delta_log": "Delta", ".hoodie": "Hudi"}


class ForeignTableError(InputError):
    """Files in a table's folder that would be read without the table's log."""


class TableFolder(NamedTuple):
    """The folder of a table, and the table's format."""

    path: str
    kind: str

    def refusal(self, *, in_job: bool = False) -> str:
        """Returns the error message for a reader that would list files in this folder. A job's spec names the
        format."""
        if self.kind == "feature":
            return f"{self.path}: this is the folder of a feature table; name the table's folder itself, not its files"
        how = {
            "Delta": "name the table's folder itself",
            "Iceberg": "name its newest …metadata.json, or iceberg://CATALOG/NAMESPACE.TABLE",
        }.get(self.kind)
        if how is None:
            how = (
                "write the rows to plain Parquet by the table's log (Spark: "
                f"spark.read.format({self.kind.lower()!r}).load({self.path!r}).write.parquet(FOLDER)) and name that "
                "folder"
            )
        elif in_job:
            how += f', with format = "{self.kind.lower()}"'
        article = "an" if self.kind == "Iceberg" else "a"
        return (
            f"{self.path}: this is the folder of {article} {self.kind} table, which may hold rows that the table has "
            f"removed. Files are not listed there: {how}"
        )


class TableFinder:
    """Looks for tables in one store. `is_folder` and `names_in` take paths of the store. Looks at each folder once."""

    def __init__(
        self, is_folder: Callable[[str], bool], names_in: Callable[[str], Iterable[str]]
    ) -> None:
        self._is_folder, self._names_in = is_folder, names_in
        self._at = cache(self._find)

    def above(self, path: str) -> TableFolder | None:
        """Returns the innermost table whose folder holds this file, at any depth."""
        return self._at(path.rpartition("/")[0])

    def _find(self, folder: str) -> TableFolder | None:
        if not folder or folder.endswith(("/", ":")):  # the root of the store, or a URI's scheme
            return None
        for mark, kind in _KINDS.items():
            if self._is_folder(f"{folder}/{mark}"):
                return TableFolder(folder, kind)
        metadata = f"{folder}/metadata"
        if self._is_folder(metadata) and any(
            name.endswith(".metadata.json") for name in self._names_in(metadata)
        ):
            return TableFolder(folder, "Iceberg")
        return self._at(folder.rpartition("/")[0])


class LocalTables:
    """The tables of this machine's file system. Follows links, because their targets may be in a table's folder."""

    def __init__(self) -> None:
        self._finder = TableFinder(os.path.isdir, _names_in)
        self._of_folder = cache(self._find)

    def above(self, path: str) -> TableFolder | None:
        """Returns the table whose folder holds this file or the target of its links."""
        folder = self._of_folder(os.path.dirname(path))
        return (
            folder or self._of_folder(os.path.dirname(os.path.realpath(path)))
            if os.path.islink(path)
            else folder
        )

    def refuse_listed(self, paths: Iterable[str]) -> None:
        """Raises ForeignTableError if one of these listed files is in a table's folder."""
        if table := next(filter(None, map(self.above, paths)), None):
            raise ForeignTableError(table.refusal())

    def refuse_removed(self, files: Iterable[str]) -> None:
        """Raises ForeignTableError if one of these files is in a table's folder, but not in its newest version."""
        current = cache(lambda path: {*map(os.path.realpath, TableFiles.open(path).files)})
        for file in files:
            table = self.above(file)
            if table is None:
                continue
            if table.kind not in ("Delta", "feature"):
                raise ForeignTableError(table.refusal())
            if os.path.realpath(file) not in current(table.path):
                raise ForeignTableError(
                    f"{file}: the newest version of the {table.kind} table {table.path} does not "
                    "hold this file, so its rows may be removed; name the table's folder itself, or only files of "
                    "deltalake.DeltaTable(…).file_uris()"
                )

    def _find(self, folder: str) -> TableFolder | None:
        named, real = os.path.abspath(folder), os.path.realpath(folder)
        return self._finder.above(f"{named}/") or self._finder.above(f"{real}/")


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # this user cannot read a table in such a folder
        return []
