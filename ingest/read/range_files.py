"""Reads ranges of one file of a store: `open_range_file`. `sluice.common.stores` opens the store. The errors are those
of the store's client, which `translated` makes alike.

No position is kept, so a read can be repeated. This module does not retry. `sluice.ingest.read.retry` does.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import pyarrow.fs as pafs

from sluice.ingest.read.retry import ThrottledError

_DENIED = re.compile(
    r"ACCESS_DENIED|FORBIDDEN|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE_DOES_NOT_MATCH|"
    r"UNRECOGNIZED_CLIENT|HTTP status 40[13]|status code: 40[13]"
)
_THROTTLED = re.compile(
    r"SLOW_DOWN|THROTTL|SERVICE_UNAVAILABLE|TOO_MANY_REQUESTS|(?:HTTP status|Error:|status code:) (?:429|503)\b"
)


Stored = bytes | memoryview
"""Bytes as a store's client holds them."""


class RangeFile(Protocol):
    """One file to read ranges from."""

    size: int
    tag: str
    """Changes when the file changes."""
    is_current: bool
    """Whether each read brings size and tag up to date."""

    def read(self, offset: int, length: int) -> Stored: ...
    def close(self) -> None: ...


def open_range_file(files: Any, prefix: str, key: str) -> RangeFile:
    """Opens a file of a store, whose name is the store's prefix and the file's key."""
    if not isinstance(files, pafs.FileSystem):
        from sluice.ingest.read.s3_files import S3File

        return S3File(files, key.partition("/")[2])
    if isinstance(files, pafs.PyFileSystem):
        return FsspecFile(files.handler.fs, f"{prefix}{key}")
    return ArrowFile(files, key)


def translated(error: Exception, name: str) -> OSError:
    """Turns a refused access into a PermissionError, 503 or 429 into a ThrottledError, and a client's own errors into
    OSErrors. Only the client's text tells them apart."""
    said, _, _ = str(error).partition("\n\nDebug source")
    text = f"{type(error).__name__}: {said}"
    if _THROTTLED.search(text):
        return ThrottledError(f"{name}: {text}")
    if _DENIED.search(said):
        return PermissionError(
            f"{name}: {said}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role"
        )
    return error if isinstance(error, OSError) else OSError(f"{name}: {text}")


class ArrowFile:
    """A file in one of Arrow's own file systems, or a local file."""

    is_current = False

    def __init__(self, files: Any, key: str):
        self._file = files.open_input_file(key)
        self.size = self._file.size()
        about = self._file.metadata() or {}
        self.tag = str(about.get(b"ETag") or files.get_file_info(key).mtime_ns)

    def read(self, offset: int, length: int) -> bytes:
        data: bytes = self._file.read_at(length, offset)
        return data

    def close(self) -> None:
        self._file.close()


class FsspecFile:
    """A file in any store that fsspec knows, for instance gs, abfs, https, hdfs or memory."""

    is_current = False

    def __init__(self, files: Any, name: str):
        path = files._strip_protocol(name)
        self._files, self._path = files, path
        files.invalidate_cache(path)  # an old listing may describe an earlier file
        info = files.info(path)
        if info.get("type") == "directory":
            raise IsADirectoryError(f"{path} is a folder")
        if info.get("size") is None:
            raise ValueError(
                f"{path}: the store does not report its size, so it cannot be read in ranges"
            )
        self.size = int(info["size"])
        tags = ("ETag", "etag", "mtime", "LastModified", "updated", "created")
        self.tag = str(next(filter(None, map(info.get, tags)), ""))

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._files.cat_file(self._path, start=offset, end=offset + length))

    def close(self) -> None:
        """Does nothing, because no file is held open between reads."""
