"""Reads ranges of one file of a store: `open_range_file`. `sluice.common.stores` opens the store.

No position is kept, so a read can be repeated. This module does not retry. `sluice.ingest.read.retry` does.
"""

from __future__ import annotations

import re
from typing import Any, Protocol

import pyarrow.fs as pafs

from sluice.ingest.read.retry import ThrottledError

_DENIED = re.compile(
    r"ACCESS_DENIED|FORBIDDEN|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE_DOES_NOT_MATCH|"
    r"UNRECOGNIZED_CLIENT|HTTP status 40[13]"
)
_THROTTLED = re.compile(
    r"SLOW_DOWN|THROTTL|SERVICE_UNAVAILABLE|TOO_MANY_REQUESTS|(?:HTTP status|Error:) (?:429|503)\b"
)


class RangeFile(Protocol):
    """One file to read ranges from. `tag` changes when the file changes."""

    size: int
    tag: str

    def read(self, offset: int, length: int) -> bytes: ...
    def close(self) -> None: ...


def open_range_file(files: Any, prefix: str, key: str) -> RangeFile:
    """Opens a file of a store, whose name is the store's prefix and the file's key."""
    if isinstance(files, pafs.PyFileSystem):
        return FsspecFile(files.handler.fs, prefix, key)
    return ArrowFile(files, prefix, key)


class ArrowFile:
    """A file in one of Arrow's own file systems, for instance S3 (keys are `bucket/path`), or a local file."""

    def __init__(self, files: Any, prefix: str, key: str):
        name = self._name = f"{prefix}{key}"
        try:
            self._file = files.open_input_file(key)
            self.size = self._file.size()
            about = self._file.metadata() or {}
            self.tag = str(about.get(b"ETag") or files.get_file_info(key).mtime_ns)
        except OSError as error:
            raise _translate_error(error, name) from error

    def read(self, offset: int, length: int) -> bytes:
        try:
            data: bytes = self._file.read_at(length, offset)
            return data
        except OSError as error:
            raise _translate_error(error, self._name) from error

    def close(self) -> None:
        self._file.close()


def _translate_error(error: OSError, name: str) -> OSError:
    """Turns a refused access into a PermissionError, and 503 or 429 into a ThrottledError. Only the client's text tells
    them from other errors."""
    if _THROTTLED.search(str(error)):
        return ThrottledError(f"{name}: {error}")
    if _DENIED.search(str(error)):
        return PermissionError(
            f"{name}: {error}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role"
        )
    return error


class FsspecFile:
    """A file in any store that fsspec knows, for instance gs, abfs, https, hdfs or memory."""

    def __init__(self, files: Any, prefix: str, key: str):
        path = files._strip_protocol(f"{prefix}{key}")
        self._files, self._path = files, path
        files.invalidate_cache(path)  # an old listing may describe an earlier file
        info = self._try(files.info, path)
        if info.get("type") == "directory":
            raise IsADirectoryError(f"{path} is a folder")
        if info.get("size") is None:
            raise ValueError(
                f"{path}: the store does not report its size, so it cannot be read in ranges"
            )
        self.size = int(info["size"])
        self.tag = str(
            next(
                (
                    info[k]
                    for k in ("ETag", "etag", "mtime", "LastModified", "updated", "created")
                    if info.get(k)
                ),
                "",
            )
        )

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._try(self._files.cat_file, self._path, start=offset, end=offset + length))

    def close(self) -> None:
        """Does nothing, because no file is held open between reads."""

    def _try(self, action: Any, *args: Any, **options: Any) -> Any:
        """Turns a network client's own errors into OSError."""
        try:
            return action(*args, **options)
        except (OSError, ValueError, TypeError, NotImplementedError, MemoryError):
            raise
        except Exception as error:
            text = f"{self._path}: {type(error).__name__}: {error}"
            raise (ThrottledError if _THROTTLED.search(text) else OSError)(text) from error
