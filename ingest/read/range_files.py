"""Reads files in ranges: `LocalFiles`, `ArrowFiles` and `FsspecFiles`. `sluice.common.stores` opens their stores.

A `FileSystem` opens a key as a `RangeFile`, which reads ranges and keeps no position, so a read can be repeated. This
module does not retry. `sluice.ingest.read.retry` does.
"""

from __future__ import annotations

import os
import re
from typing import Any, Protocol

_DENIED = re.compile(
    r"ACCESS_DENIED|FORBIDDEN|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE_DOES_NOT_MATCH|"
    r"UNRECOGNIZED_CLIENT|HTTP status 40[13]"
)


class RangeFile(Protocol):
    """One file to read ranges from. `tag` changes when the file changes."""

    size: int
    tag: str

    def read(self, offset: int, length: int) -> bytes: ...
    def close(self) -> None: ...


class FileSystem(Protocol):
    def open(self, key: str) -> RangeFile: ...


class LocalFiles:
    def open(self, key: str) -> RangeFile:
        return _LocalSource(key)


class _LocalSource:
    def __init__(self, path: str):
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        self.size, self.tag = status.st_size, f"{status.st_ino}-{status.st_mtime_ns}"

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ArrowFiles:
    """Reads files through one of Arrow's own file systems, for instance S3. Keys are `bucket/path`."""

    def __init__(self, files: Any, scheme: str):
        self._files = files
        self._scheme = scheme

    def open(self, key: str) -> RangeFile:
        return _ArrowSource(self._files, key, f"{self._scheme}://{key}")


class _ArrowSource:
    def __init__(self, files: Any, key: str, name: str):
        self._name = name
        try:
            self._file = files.open_input_file(key)
            self.size = self._file.size()
            etag = self._file.metadata().get(b"ETag")
            self.tag = str(etag or files.get_file_info(key).mtime_ns)
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
    """Turns a refused access into a PermissionError. Only pyarrow's text tells it from a temporary error."""
    if _DENIED.search(str(error)):
        return PermissionError(
            f"{name}: {error}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role"
        )
    return error


class FsspecFiles:
    """Reads files in any store that fsspec knows, for instance gs, abfs, https, hdfs or memory."""

    def __init__(self, files: Any, scheme: str):
        self._files = files
        self._scheme = scheme

    def open(self, key: str) -> RangeFile:
        return _FsspecSource(self._files, self._files._strip_protocol(f"{self._scheme}://{key}"))


class _FsspecSource:
    def __init__(self, files: Any, path: str):
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
            raise OSError(f"{self._path}: {type(error).__name__}: {error}") from error
