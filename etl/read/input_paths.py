"""`files_of`: returns the files of a job's input, given paths, folders, globs and URIs of any store."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pyarrow as pa
import pyarrow.fs as pafs

from sluice.common.errors import InputError
from sluice.common.stores import Place
from sluice.etl.table.foreign_tables import ForeignTableError, LocalTables, TableFinder
from sluice.etl.table.table_columns import FileColumns
from sluice.etl.table.table_files import TableFiles

_MAGIC = re.compile(r"[*?\[{]")
_DENIED = re.compile(r"ACCESS_DENIED|HTTP status 403|Forbidden", re.IGNORECASE)
_FOLDER, _FILE = pafs.FileType.Directory, pafs.FileType.File


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the input, with its file system."""

    fs: pafs.FileSystem = field(compare=False)
    path: str
    size: int
    name: str
    """Its URI as Spark writes it, for messages and rejects."""

    @property
    def name_in_rejects(self) -> str:
        """The name as Spark writes it in rows: with one slash for a local file."""
        return self.name.replace("file:///", "file:/")

    def open(self) -> pa.NativeFile:
        return self.fs.open_input_file(self.path)


def files_of(paths: Iterable[str]) -> list[InputFile]:
    """Returns the files that these paths name, sorted by name. Names that begin with _ or . are left out, as in Spark.
    Raises an InputError if two paths name the same file, and a ForeignTableError if a file is in a table's folder."""
    files: list[InputFile] = []
    for path in paths:
        try:
            fs, inner, prefix = store_of(path)
            listed: list[pafs.FileInfo] = []
            matched = [info for pattern in _braces(inner) for info in _matched(fs, pattern, listed)]
            if not matched:
                raise InputError(f"{path}: matches no file")
            taken: list[pafs.FileInfo] = []
            for info in matched:
                below = (
                    fs.get_file_info(pafs.FileSelector(info.path, recursive=True))
                    if info.type == _FOLDER
                    else []
                )
                listed += below
                base = len(info.path if info.type == _FOLDER else os.path.dirname(info.path))
                taken += [
                    f for f in below or [info] if f.type == _FILE and not _hidden(f.path[base:])
                ]
            _refuse_tables(fs, [*matched, *taken], listed, prefix)
            files += [InputFile(fs, f.path, f.size, prefix + f.path) for f in taken]
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"{path}: cannot be read ({error})") from None
    files.sort(key=lambda file: file.name)
    if again := next(
        (file.name for file, other in pairwise(files) if file.name == other.name), None
    ):
        raise InputError(
            f"{again}: is meant twice, so that each of its rows would be read twice; name it, or a folder "
            "or glob with it, once"
        )
    return files


def files_of_tables(tables: Iterable[TableFiles]) -> dict[InputFile, FileColumns]:
    """Returns the files of tables, each with where it has the table's columns."""
    files: dict[InputFile, FileColumns] = {}
    for table in tables:
        for path, columns in table.columns.items():
            fs, inner, prefix = store_of(path)
            size = fs.get_file_info(inner).size
            files[InputFile(fs, inner, size or 0, prefix + inner)] = columns
    return files


def store_of(path: str) -> tuple[pafs.FileSystem, str, str]:
    """Returns the file system of a path or URI, the path within it, and the part of the URI before that."""
    # Spark does not decode the names of files, and writes local ones with one slash.
    local = path.removeprefix("file:") if not path.startswith("file://") else path
    place = Place.of(local, decode=False)
    fs, inner = place.files()
    return fs, inner, place.prefix or "file://"


def _refuse_tables(
    fs: pafs.FileSystem,
    taken: Iterable[pafs.FileInfo],
    listed: Iterable[pafs.FileInfo],
    prefix: str,
) -> None:
    """Raises a ForeignTableError if one of these files or folders is in a table's folder. To check a folder in a remote
    store takes up to eight requests, so `listed` has what earlier requests returned."""
    known: dict[str, set[str]] = {}
    for info in listed:
        folder, _, name = info.path.rpartition("/")
        known.setdefault(folder, set()).add(name)

    def is_folder(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in known[folder] if folder in known else _is_folder(fs, path)

    local = isinstance(fs, pafs.LocalFileSystem)
    tables = LocalTables() if local else TableFinder(is_folder, partial(_names_in, fs))
    paths = (f"{info.path}/" if info.type == _FOLDER else info.path for info in taken)
    if table := next(filter(None, map(tables.above, paths)), None):
        named = table._replace(path=prefix.removeprefix("file://") + table.path)
        raise ForeignTableError(named.refusal(in_job=True))


def _is_folder(fs: pafs.FileSystem, path: str) -> bool:
    try:
        return bool(fs.get_file_info(path).type == _FOLDER)
    except OSError as error:
        # The rights to a folder may not include those to the folders above it.
        if _DENIED.search(str(error)):
            return False
        raise


def _names_in(fs: pafs.FileSystem, folder: str) -> list[str]:
    return [
        info.base_name for info in fs.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    ]


def _hidden(path: str) -> bool:
    return any(
        part.startswith(".") or (part.startswith("_") and "=" not in part)
        for part in path.split("/")
    )


def _braces(path: str) -> Iterator[str]:
    """Yields a path with each of its alternatives in braces."""
    if not (braces := re.search(r"\{([^{}]*)\}", path)):
        yield path
        return
    for choice in braces[1].split(","):
        yield from _braces(path[: braces.start()] + choice + path[braces.end() :])


def _matched(fs: pafs.FileSystem, path: str, listed: list[pafs.FileInfo]) -> list[pafs.FileInfo]:
    """Returns the files and folders that a path with wildcards names. A wildcard does not match a slash. Adds the
    contents of the listed folders to `listed`."""
    parts = path.rstrip("/").split("/")
    first = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    paths = ["/".join(parts[:first])]
    for part in parts[first:]:
        if _MAGIC.search(part):
            below = [
                info
                for folder in paths
                for info in fs.get_file_info(pafs.FileSelector(folder or "/", allow_not_found=True))
            ]
            listed += below
            paths = [
                below_path
                for below_path in (info.path for info in below)
                if fnmatch.fnmatchcase(below_path.rsplit("/", 1)[-1], part)
            ]
        else:
            paths = [f"{folder}/{part}" for folder in paths]
    return [info for info in fs.get_file_info(paths) if info.type in (_FILE, _FOLDER)]
