"""The files that a job's input names: `files_of` resolves paths, folders, globs and URIs of any store."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.fs as pafs

from sluice.etl.common.errors import InputError

_MAGIC, _QUERY = re.compile(r"[*?\[{]"), re.compile(r"\?\w+=.*$")
_FOLDER, _FILE = pafs.FileType.Directory, pafs.FileType.File


class SameFile(InputError):
    """A file that is meant twice."""


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
    """All files that these name, sorted by name; those that begin with _ or . are none, as in Spark. SameFile if two of
    them name the same."""
    found = []
    for path in paths:
        try:
            fs, inner, prefix = store_of(path)
            matched = [info for one in _braces(inner) for info in _matched(fs, one)]
            if not matched:
                raise InputError(f"{path}: matches no file")
            for info in matched:
                below = fs.get_file_info(pafs.FileSelector(info.path, recursive=True)) if info.type == _FOLDER else []
                base = len(info.path if info.type == _FOLDER else os.path.dirname(info.path))
                found += [InputFile(fs, f.path, f.size, prefix + f.path) for f in below or [info]
                          if f.type == _FILE and not _hidden(f.path[base:])]
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(f"{path}: cannot be read ({error})") from None
    found.sort(key=lambda file: file.name)
    if again := next((one.name for one, other in pairwise(found) if one.name == other.name), None):
        raise SameFile(f"{again}: is meant twice, so that each of its rows would be there twice; name it, or a folder "
                       "or glob that holds it, once")
    return found


def store_of(path: str) -> tuple[pafs.FileSystem, str, str]:
    """The file system of a path or URI, the path within it, and what stands before that in a URI."""
    scheme, mark, rest = path.partition("://")
    if not mark or scheme == "file":
        return pafs.LocalFileSystem(), os.path.abspath(rest or path.removeprefix("file:")), "file://"
    query = found[0] if (found := _QUERY.search(rest)) else ""
    rest, scheme = rest.removesuffix(query), "s3" if scheme in ("s3a", "s3n") else scheme
    host = rest.partition("/")[0]
    try:
        return pafs.FileSystem.from_uri(f"{scheme}://{host}{query}")[0], rest, f"{scheme}://"
    except pa.ArrowInvalid:
        pass
    try:
        import fsspec

        other, inner = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise InputError(f"{path}: neither Arrow nor fsspec knows a store {scheme!r} here ({error})") from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(other)), inner, f"{scheme}://"


def _hidden(path: str) -> bool:
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in path.split("/"))


def _braces(path: str) -> Iterator[str]:
    """A path with each of its alternatives in braces."""
    if not (found := re.search(r"\{([^{}]*)\}", path)):
        yield path
        return
    for one in found[1].split(","):
        yield from _braces(path[:found.start()] + one + path[found.end():])


def _matched(fs: pafs.FileSystem, path: str) -> list[pafs.FileInfo]:
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
    return [info for info in fs.get_file_info(found) if info.type in (_FILE, _FOLDER)]
