"""The stores that files are read from: local files, S3, and all stores that fsspec knows.

A `FileSystem` opens a key as a `RangeFile`, which reads ranges and keeps no position, so a read can be repeated. This
module does not retry. `sluice.ingest.read.retry` does.
"""

from __future__ import annotations

import os
import re
from typing import Any, Protocol

from sluice.ingest.knobs import nearest

_DENIED = re.compile(
    r"ACCESS_DENIED|FORBIDDEN|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE_DOES_NOT_MATCH|"
    r"UNRECOGNIZED_CLIENT|HTTP status 40[13]"
)
_S3_OPTIONS = ("endpoint_override", "scheme", "region", "anonymous", "allow_bucket_creation")
_S3_REQUEST_S, _S3_CONNECT_S = 30.0, 10.0


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


class S3Files:
    """Reads files through pyarrow's own S3 client. Keys are `bucket/path`."""

    def __init__(self, options: dict[str, str]):
        from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

        for name in options:
            if name not in _S3_OPTIONS:
                raise ValueError(f"s3://: unknown option {name!r}{nearest(name, _S3_OPTIONS)}")
        settings: dict[str, Any] = {**_endpoint(), **options}
        for name in ("anonymous", "allow_bucket_creation"):
            if name in settings:
                settings[name] = settings[name].lower() in ("1", "true", "yes")
        # Only `Retrier` retries, so that its counts show all attempts.
        self._files = S3FileSystem(
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=1),
            request_timeout=_S3_REQUEST_S,
            connect_timeout=_S3_CONNECT_S,
            **settings,
        )

    def open(self, key: str) -> RangeFile:
        return _S3Source(self._files, key)


def _endpoint() -> dict[str, str]:
    """Returns the endpoint that the environment sets for all clients. Arrow reads these variables only for URIs."""
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    scheme, _, address = url.partition("://")
    return {"scheme": scheme, "endpoint_override": address.rstrip("/")} if address else {}


class _S3Source:
    def __init__(self, files: Any, key: str):
        self._key = key
        try:
            self._file = files.open_input_file(key)
            self.size = self._file.size()
            self.tag = str(self._file.metadata().get(b"ETag"))
        except OSError as error:
            raise _translate_error(error, key) from error

    def read(self, offset: int, length: int) -> bytes:
        try:
            data: bytes = self._file.read_at(length, offset)
            return data
        except OSError as error:
            raise _translate_error(error, self._key) from error

    def close(self) -> None:
        self._file.close()


def _translate_error(error: OSError, key: str) -> OSError:
    """Turns a refused access into a PermissionError. Only pyarrow's text tells it from a temporary error."""
    if _DENIED.search(str(error)):
        return PermissionError(
            f"s3://{key}: {error}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role"
        )
    return error


class FsspecFiles:
    """Reads files in any store that fsspec knows, for instance gs, abfs, https, hdfs or memory."""

    def __init__(self, scheme: str, options: dict[str, str]):
        try:
            import fsspec
        except ImportError:
            raise ValueError(f"{scheme}:// needs the package fsspec: pip install fsspec") from None
        try:
            self._files = fsspec.filesystem(scheme, **options)
        except ImportError as error:
            raise ValueError(f"{scheme}://: {error}") from None
        except ValueError as error:
            raise ValueError(
                f"{scheme}://: {error} (local paths, s3, latency and fsspec's schemes can be read)"
            ) from None
        self._scheme = scheme

    def open(self, key: str) -> RangeFile:
        return _FsspecSource(self._files, self._files._strip_protocol(f"{self._scheme}://{key}"))


class _FsspecSource:
    def __init__(self, files: Any, path: str):
        self._files, self._path = files, path
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
