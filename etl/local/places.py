"""The files that a job's input names: `files_of` resolves paths, folders, globs and URIs of any store."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from sluice.etl.common.errors import InputError

_MAGIC = re.compile(r"[*?\[{]")
_QUERY = re.compile(r"\?\w+=.*$")


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, in its store."""

    fs: pafs.FileSystem
    path: str
    size: int
    name: str
    """Its URI in messages and among rejects, as Spark has it."""

    def open(self) -> pa.NativeFile:
        return self.fs.open_input_file(self.path)


def files_of(paths: Iterable[str]) -> list[InputFile]:
    """All files that these name, sorted by name; those that begin with _ or . are none, as in Spark."""
    found = []
    for path in paths:
        try:
            fs, inner, prefix = store_of(path)
            matched = [info for one in _braces(inner) for info in _matched(fs, one)]
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"{path}: cannot be read ({error})") from None
        if not matched:
            raise InputError(f"{path}: matches no file")
        for info in matched:
            files = [info] if info.type == pafs.FileType.File else \
                fs.get_file_info(pafs.FileSelector(info.path, recursive=True))
            base = len(info.path) if info.type == pafs.FileType.Directory else len(os.path.dirname(info.path))
            found += [InputFile(fs, f.path, f.size, prefix + f.path) for f in files
                      if f.type == pafs.FileType.File and not _hidden(f.path[base:])]
    return sorted(found, key=lambda file: file.name)


def store_of(path: str) -> tuple[pafs.FileSystem, str, str]:
    """The file system of a path or URI, the path within it, and what stands before that in a URI."""
    scheme, mark, rest = path.partition("://")
    if not mark:
        return pafs.LocalFileSystem(), os.path.abspath(path.removeprefix("file:")), "file://"
    if scheme == "file":
        return pafs.LocalFileSystem(), "/" + rest.lstrip("/"), "file://"
    scheme = "s3" if scheme in ("s3a", "s3n") else scheme
    query = found[0] if (found := _QUERY.search(rest)) else ""
    rest = rest.removesuffix(query)
    root, _, _ = rest.partition("/")
    try:
        fs, inner = pafs.FileSystem.from_uri(f"{scheme}://{root}{query}")
        below = rest[len(root):] if scheme in ("hdfs", "viewfs") else rest
        return fs, below or inner, f"{scheme}://{root if scheme in ('hdfs', 'viewfs') else ''}"
    except pa.ArrowInvalid:
        return _of_fsspec(path)


def _of_fsspec(path: str) -> tuple[pafs.FileSystem, str, str]:
    scheme = path.partition("://")[0]
    try:
        import fsspec
    except ModuleNotFoundError:
        raise InputError(f"{path}: Arrow knows no store {scheme!r}, and fsspec, which may, is not installed") from None
    try:
        fs, inner = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise InputError(f"{path}: no store is known by {scheme!r} ({error})") from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), inner, f"{scheme}://"


def _hidden(path: str) -> bool:
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in path.split("/"))


def _braces(path: str) -> Iterator[str]:
    """A path with each of its alternatives in braces."""
    found = re.search(r"\{([^{}]*)\}", path)
    if found is None:
        yield path
        return
    for one in found[1].split(","):
        yield from _braces(path[:found.start()] + one + path[found.end():])


def _matched(fs: pafs.FileSystem, path: str) -> list[Any]:
    """The files and folders that a path with wildcards names; a wildcard does not match a slash."""
    parts = path.rstrip("/").split("/")
    first = next((number for number, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    found = ["/".join(parts[:first])]
    for part in parts[first:]:
        if _MAGIC.search(part):
            below = [info.path for folder in found
                     for info in fs.get_file_info(pafs.FileSelector(folder or "/", allow_not_found=True))]
            found = [one for one in below if fnmatch.fnmatchcase(one.rsplit("/", 1)[-1], part)]
        else:
            found = [f"{folder}/{part}" for folder in found]
    infos = [fs.get_file_info(one) for one in found]
    return [info for info in infos if info.type in (pafs.FileType.File, pafs.FileType.Directory)]
