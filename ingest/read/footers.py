"""Reads the footers of Parquet files and remembers them in a file next to them: `Footer`, `footers_of`.

A remembered footer is used only if its digest matches the footer in the Parquet file. The file of remembered footers
is used only if no user could have written it who could not also write the data.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.stores import Place
from sluice.etl.spec.nested_columns import parts
from sluice.ingest.plain.file_types import SEVERAL
from sluice.ingest.plain.footer_chunks import chunks_of_group, footer_bytes
from sluice.ingest.read.open_file import footer_by, stored_footer
from sluice.ingest.read.retry import without_frames

REMEMBERED = ".sluice-footers.json"
_HELD_BYTES = 4 * 2**20
"""Stored bytes of the footers that a loader holds. Arrow takes about eleven times as much memory for them."""
_DENSEST = 1024  # most ids a byte of a file; a larger figure comes from a damaged footer


class FooterError(ValueError):
    """A footer cannot be read. The message names the file."""


@dataclass(frozen=True, slots=True)
class Footer:
    """The parts of a file's footer that a loader needs."""

    bytes: int
    modified_ns: int
    row_groups: tuple[int, ...]
    types: Mapping[str, str]
    """Arrow's name of each column's type. Parts of structs have dotted names (`sluice.etl.spec.nested_columns`)."""
    ids: Mapping[str, int]
    """For each column that may hold bags, an estimate of the number of its ids in the file."""
    digest: str
    """Digest of the footer's bytes and of the fields above."""


class HeldFooters:
    """The footers of files by number, as many of local files as fit. Other footers are read again with their file.

    None is dropped for another one, and the footer of one row group is not held. Otherwise small objects of many ages
    would scatter the free memory, and a file would cost up to twice as much. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, pq.FileMetaData] = {}
        self._bytes = 0
        """The stored bytes of the held footers that can be read again for little."""
        self._seen: dict[int, tuple[tuple[Any, ...], bytes]] = {}
        """For each file, its size, time (or a store's tag) and inode, and the digest of a local file's footer."""

    def get(self, number: int) -> pq.FileMetaData | None:
        return self._held.get(number)

    def hold(self, number: int, footer: pq.FileMetaData, *, is_local: bool) -> None:
        """Holds a footer if it is the first, if its file is in a store, or if it has several row groups and fits."""
        with self._lock:
            size = footer.serialized_size if is_local else 0
            fits = footer.num_row_groups > 1 and self._bytes + size <= _HELD_BYTES
            if number not in self._held and (fits or not size or not self._held):
                self._held[number] = footer
                self._bytes += size

    def is_unchanged(self, number: int, at: int | str | tuple[Any, ...]) -> bool:
        """Whether a file is the one that was first seen under this number. `at` is the path or the descriptor of a
        local file, or the state of a store's file (`OpenFile.state`).

        Some mounts give a file another inode. Its footer must then be the same."""
        if isinstance(at, tuple):
            return self._seen.setdefault(number, (at, b""))[0] == at
        about = os.stat(at)
        state = about.st_size, about.st_mtime_ns, about.st_ino
        before = self._seen.get(number, (state, b""))[0]
        if number not in self._seen or (before[:2] == state[:2] and before != state):
            with open(at, "rb", buffering=0, closefd=isinstance(at, str)) as file:
                footer = footer_by(partial(os.pread, file.fileno()), about.st_size)
            digest = hashlib.sha256(footer).digest()
            with self._lock:
                if self._seen.get(number, (state, digest))[1] == digest:
                    self._seen[number] = state, digest
        return self._seen[number][0] == state


def metadata_of(path: str, opened: Any) -> tuple[pq.FileMetaData, pa.Schema]:
    """Reads the footer of a file and its schema."""
    try:
        metadata = pq.read_metadata(opened)
        schema = metadata.schema.to_arrow_schema()
        counts = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        str(schema)  # only this detects names that are not valid text
    except Exception as error:  # flipped bits can cause any kind of error
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise FooterError(
                f"{path}: cannot be read ({error}); check its disk or mount, or copy the file again "
                "from another place"
            ) from without_frames(error)
        raise FooterError(
            f"{path}: its footer cannot be read ({type(error).__name__}: {error}); the file is damaged, "
            "or it is not Parquet (`sluice etl` makes a table of other logs)"
        ) from without_frames(error)
    if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
        raise FooterError(
            f"{path}: its footer lists {metadata.num_rows} rows, but its {len(counts)} row groups have "
            f"{sum(counts)}; the file is damaged"
        )
    return metadata, schema


def footers_of(paths: Sequence[str]) -> list[Footer]:
    """Reads the footers of all files in parallel. Unchanged files use the remembered footers."""
    root = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths])
    names = [os.path.relpath(os.path.abspath(p), root) for p in paths]
    known = _read_remembered(root)

    def footer(path: str, name: str) -> Footer:
        try:
            status = os.stat(path)
            if not status.st_size:
                raise FooterError(f"{path}: this file is empty; write it anew, or leave it out")
            content = stored_footer(path, status.st_size)
        except OSError as error:
            raise FooterError(f"{path}: {error.strerror or error}") from error
        before = known.get(name)
        if (
            before is not None
            and (before.bytes, before.modified_ns) == (status.st_size, status.st_mtime_ns)
            and before.digest == _digest(content, before.row_groups, before.types, before.ids)
        ):
            return before
        return _described(path, path, (status.st_size, status.st_mtime_ns), content)

    with ThreadPoolExecutor(16, "sluice-footers") as pool:
        found = list(pool.map(footer, paths, names))
    if any(known.get(name) is not f for name, f in zip(names, found, strict=True)):
        _write_remembered(root, {**known, **dict(zip(names, found, strict=True))})
    return found


def footers_in_stores(uris: Sequence[str]) -> list[Footer]:
    """Reads the footers of files in stores. Remembers none."""

    def footer(uri: str) -> Footer:
        try:
            with Place.of(uri).open() as file:
                size = file.size()
                return _described(uri, file, (size, 0), footer_by(file.read_at, size))
        except OSError as error:
            raise FooterError(f"{uri}: {error}") from error

    with ThreadPoolExecutor(16, "sluice-footers") as pool:
        return list(pool.map(footer, uris))


def _described(path: str, opened: Any, about: tuple[int, int], content: bytes) -> Footer:
    """Reads a footer. `about` has the file's size and the time of its last change."""
    metadata, schema = metadata_of(path, opened)
    there = list(parts(schema))
    names_there = [f.name for f in there]
    counts = tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))
    types = {f.name: str(f.type) if names_there.count(f.name) == 1 else SEVERAL for f in there}
    ids = _ids(path, about[0], metadata, schema)
    return Footer(*about, counts, types, ids, _digest(content, counts, types, ids))


def _digest(
    content: bytes, counts: Sequence[int], types: Mapping[str, str], ids: Mapping[str, int]
) -> str:
    described = json.dumps([list(counts), list(types.items()), sorted(ids.items())])
    return hashlib.sha256(content + described.encode()).hexdigest()[:32]


def _ids(path: str, size: int, metadata: pq.FileMetaData, schema: pa.Schema) -> dict[str, int]:
    """Estimates the number of ids in each column of bags, from the first row group that has rows.

    For lists, it counts values, where an empty list counts as one. For binary columns, it uses the uncompressed bytes,
    which include page headers and hold repeated bags of a dictionary only once."""
    lists = {f.name for f in schema if pa.types.is_list(f.type) or pa.types.is_large_list(f.type)}
    packed = {
        f.name for f in schema if pa.types.is_binary(f.type) or pa.types.is_large_binary(f.type)
    }
    first = next(
        (n for n in range(metadata.num_row_groups) if metadata.row_group(n).num_rows), None
    )
    if first is None or not (lists or packed):
        return dict.fromkeys(lists | packed, 0)
    found = {}
    try:
        share = metadata.num_rows / metadata.row_group(first).num_rows
        for leaf, chunk in enumerate(chunks_of_group(footer_bytes(metadata), first)):
            name = metadata.schema.column(leaf).path.split(".")[0]
            if name in lists | packed:
                ids = chunk.values if name in lists else chunk.plain // 4 - chunk.values
                found[name] = round(share * min(max(0, ids), size * _DENSEST))
    except Exception as error:
        raise FooterError(
            f"{path}: its footer cannot be read ({type(error).__name__}: {error}); the file is "
            "damaged"
        ) from error
    return found


# ---- remembered


def _read_remembered(root: str) -> dict[str, Footer]:
    """Reads the remembered footers. Returns none if the file is missing, is a link, can be written by other users, or
    cannot be parsed."""
    try:
        descriptor = os.open(
            Path(root, REMEMBERED), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        )
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            # The folder's owner is trusted, because it can also change the data.
            owners = {os.geteuid(), 0, os.stat(root).st_uid}
            if (
                not stat.S_ISREG(about.st_mode)
                or about.st_uid not in owners
                or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            ):
                return {}
            content = json.load(file)
        types = [dict(t) for t in content["columns"]]
        return {
            name: Footer(size, modified, tuple(groups), types[kind], dict(ids), digest)
            for name, (size, modified, groups, kind, ids, digest) in content["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return {}


def _write_remembered(root: str, footers: Mapping[str, Footer]) -> None:
    """Writes the footers to be remembered. A schema that many files share is written once. Does nothing if the folder
    cannot be written to."""
    kinds: dict[str, int] = {}
    files = {
        name: [
            f.bytes,
            f.modified_ns,
            f.row_groups,
            kinds.setdefault(json.dumps(list(f.types.items())), len(kinds)),
            f.ids,
            f.digest,
        ]
        for name, f in footers.items()
    }
    target = Path(root, REMEMBERED)
    # `doctor` finds left-over drafts by the pid.
    new = target.with_name(f"{REMEMBERED}.{secrets.token_hex(8)}.{os.getpid()}")
    with contextlib.suppress(OSError):
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with open(descriptor, "w") as file:
            os.fchmod(descriptor, 0o644)  # the umask may have given the group write access
            json.dump({"columns": [json.loads(kind) for kind in kinds], "files": files}, file)
        os.replace(new, target)
