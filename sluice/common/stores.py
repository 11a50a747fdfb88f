"""Opens what a path or a URI names: `Place`. Tables, inputs, the registry and readers all open stores here.

Arrow opens local paths, S3 and its other stores (gs, abfs, hdfs). fsspec opens all others. Connection options follow
the name: `s3://bucket/table?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1`. A local path may be read as
if it were in a slow store: `latency://60ms/ABSOLUTE/PATH`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, unquote

from sluice.common.errors import InputError
from sluice.common.extras import install_command
from sluice.common.suggest import nearest

if TYPE_CHECKING:
    import pyarrow.fs as pafs

Answer = TypeVar("Answer")
SLOW = "latency"
"""The scheme of a store that is slow on purpose."""
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_QUERY = re.compile(r"\?(\w+=.*)$", re.DOTALL)
_DELAYED = re.compile(r"(\d+(?:\.\d+)?)(ms|s)(/.*)", re.DOTALL)
_TEXTS = ("endpoint_override", "scheme", "region", "tls_ca_file_path")
_FLAGS = (
    "anonymous",
    "allow_bucket_creation",
    "allow_bucket_deletion",
    "force_virtual_addressing",
)
_S3_REQUEST_S, _S3_CONNECT_S = 30.0, 10.0
_S3_ATTEMPTS = 10
"""The most attempts of a request where the caller does not retry. They take 13 s, so a wrong address is named soon."""


class StoreError(InputError):
    """A place that cannot be opened, read or written. The message names the place and what to do."""


@dataclass(frozen=True)
class Place:
    """A file or a folder on this machine or in a store."""

    scheme: str
    """Empty for a path of this machine."""
    path: str
    """The path in its file system. In S3 it begins with the bucket."""
    query: str = ""
    """The connection options."""
    delay_ms: float | None = None
    """How long each read of this local path waits."""
    prefix: str = ""
    """What precedes the path in its name: `latency://60ms`, `s3://`, or nothing."""

    @classmethod
    def of(cls, uri: str | os.PathLike[str], *, decode: bool = True) -> Place:
        """Reads a path or a URI, and opens nothing. `decode`: whether %20 in a `file://` URI is a space. Raises a
        StoreError for a malformed URI."""
        text = os.fspath(uri)
        if (match := _URI.fullmatch(text)) is None:
            return cls("", text)
        scheme, rest = match[1].lower(), match[2]
        if scheme == "file":
            if not rest.startswith("/"):
                raise StoreError(f"{text}: write file:///path, with an absolute path")
            return cls("", unquote(rest) if decode else rest)
        if scheme == SLOW and rest and not rest.startswith("/") and "://" not in rest:
            form = _DELAYED.fullmatch(rest)
            if form is None or not form[3].strip("/"):
                raise StoreError(
                    f"{text}: write latency://60ms/ABSOLUTE/PATH, a delay in ms or s and an absolute path of this "
                    "machine"
                )
            delay_ms = float(form[1]) * (1000 if form[2] == "s" else 1)
            return cls("", form[3], "", delay_ms, f"{SLOW}://{form[1]}{form[2]}")
        query = _QUERY.search(rest)
        path = rest[: query.start()] if query else rest
        if not path:
            raise StoreError(f"{text}: there is no path in it")
        scheme = "s3" if scheme in ("s3a", "s3n") else scheme
        return cls(scheme, path, query[1] if query else "", prefix=f"{scheme}://")

    @property
    def name(self) -> str:
        """The name without connection options, for messages."""
        return f"{self.prefix}{self.path}"

    @property
    def options(self) -> dict[str, str]:
        return dict(parse_qsl(self.query, keep_blank_values=True))

    @property
    def _endpoint(self) -> str:
        """The URL of the S3 server. Empty: it is Amazon's."""
        given = self.options
        if "endpoint_override" in given:
            return f"{given.get('scheme', 'https')}://{given['endpoint_override']}"
        return _endpoint()

    @property
    def delta(self) -> dict[str, Any]:
        """The arguments with which delta-rs opens a table here."""
        options = {
            "AWS_ENDPOINT_URL": self._endpoint,
            # delta-rs refuses plain HTTP unless it is allowed.
            "AWS_ALLOW_HTTP": "true" if self._endpoint.startswith("http://") else "",
            "AWS_REGION": self.options.get("region", ""),
        }
        # A delayed path is a local path for delta-rs.
        uri = self.name.rstrip("/") if self.scheme else os.path.abspath(self.path)
        return {"table_uri": uri, "storage_options": _without_empty(options) or None}

    @property
    def iceberg(self) -> dict[str, str]:
        """The properties with which pyiceberg opens this place."""
        return _without_empty(
            {"s3.endpoint": self._endpoint, "s3.region": self.options.get("region", "")}
        )

    def files(self, *, attempts: int | None = None) -> tuple[pafs.FileSystem, str]:
        """Returns the file system, and the path in it. `attempts` limits the attempts of each request to S3,
        for callers that retry by themselves. Raises a StoreError if neither Arrow nor fsspec opens the store."""
        import pyarrow as pa
        from pyarrow import fs

        if not self.scheme:
            return fs.LocalFileSystem(), os.path.abspath(self.path)
        host, slash, key = self.path.partition("/")
        try:
            if self.scheme == "s3":
                # Each caller that retries has a client of its own, with its own connections.
                make = _s3.__wrapped__ if attempts else _s3
                bucket = host.rpartition("@")[2]
                return make(host, self.query, _endpoint(), attempts), f"{bucket}{slash}{key}"
            uri = f"{self.scheme}://{host}"
            opened, _ = fs.FileSystem.from_uri(f"{uri}?{self.query}" if self.query else uri)
            return opened, self.path
        except pa.ArrowInvalid as error:
            if self.scheme == "s3":
                raise StoreError(f"{self.name}: {error}") from None
        except OSError as error:
            raise StoreError(f"{self.name}: cannot be opened ({error})") from None
        web = self.scheme in ("http", "https")  # the query is part of the address there
        name = f"{self.name}?{self.query}" if web and self.query else self.name
        try:
            import fsspec

            other, inner = fsspec.core.url_to_fs(name, **({} if web else self.options))
        except ModuleNotFoundError as error:
            if error.name != "fsspec":
                raise
            raise StoreError(
                f"{self.name}: Arrow does not open {self.scheme!r}, and fsspec, which may, is not installed: "
                f"{install_command('petastorm')}"
            ) from None
        except (ImportError, ValueError, TypeError) as error:
            raise StoreError(
                f"{self.name}: neither Arrow nor fsspec opens a store {self.scheme!r} here ({error}); local paths, s3, "
                "latency and fsspec's schemes can be read"
            ) from None
        return fs.PyFileSystem(fs.FSSpecHandler(other)), inner

    def open(self) -> Any:
        """Opens the file for reading."""
        files, path = self.files()
        return files.open_input_file(path)


def _without_empty(texts: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if text}


def plain_path(uri: str) -> str:
    """Returns a local path without its delay. All other names stay as they are."""
    place = Place.of(uri) if uri.startswith(f"{SLOW}://") else None
    return place.path if place and not place.scheme else uri


@lru_cache(maxsize=64)
def _s3(host: str, query: str, endpoint: str, attempts: int | None) -> pafs.FileSystem:
    """Opens the store of a bucket. `host` may have keys before the bucket's name."""
    from pyarrow import fs

    keys, _, bucket = host.rpartition("@")
    scheme, _, address = endpoint.partition("://")
    settings: dict[str, Any] = {"scheme": scheme, "endpoint_override": address} if address else {}
    settings |= parse_qsl(query, keep_blank_values=True)
    for name in settings:
        if name not in (*_TEXTS, *_FLAGS):
            raise StoreError(
                f"s3://{bucket}: unknown option {name!r}{nearest(name, (*_TEXTS, *_FLAGS))}"
            )
    for name in settings.keys() & set(_FLAGS):
        settings[name] = settings[name].lower() in ("1", "true", "yes")
    if keys:
        access, _, secret = keys.partition(":")
        settings |= {"access_key": unquote(access), "secret_key": unquote(secret)}
    if not settings.keys() & {"region", "endpoint_override"}:
        with contextlib.suppress(
            OSError
        ):  # the environment's default, if the bucket does not say it
            settings["region"] = fs.resolve_s3_region(bucket)
    # It counts repetitions, and doubles its waits from 0.05 s on.
    strategy = fs.AwsDefaultS3RetryStrategy(max_attempts=(attempts or _S3_ATTEMPTS) - 1)
    settings["retry_strategy"] = strategy
    if attempts is not None:
        settings |= {"request_timeout": _S3_REQUEST_S, "connect_timeout": _S3_CONNECT_S}
        return fs.S3FileSystem(**settings)

    class PatientS3(fs.S3FileSystem):  # type: ignore[misc]
        """Asks again where a store answers 429."""

        def get_file_info(self, wanted: Any) -> Any:
            return patiently(lambda: super(PatientS3, self).get_file_info(wanted))

    return PatientS3(**settings)


def patiently(ask: Callable[[], Answer]) -> Answer:
    """Asks a store, and asks again where it answers 429. Arrow takes that for an unknown error if it can parse the text
    of the answer. Whether it can depends on what lay in memory before."""
    for repeated in range(1, _S3_ATTEMPTS):
        try:
            return ask()
        except OSError as error:
            if "HTTP status 429" not in str(error):
                raise
        time.sleep(0.025 * 2**repeated)
    return ask()


def _endpoint() -> str:
    """Returns the endpoint that the environment sets for all clients. Arrow reads these variables only for URIs."""
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return url.rstrip("/")
