"""The files next to a table's data, local or in a bucket: `TableStore` reads, writes and lists them by relative
path."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from sluice.common.stores import Place, StoreError, patiently
from sluice.etl.table import local_folder

_CHUNK = 8 * 2**20


class TableStore:
    """A folder, given as a path or a URI (`sluice.common.stores`)."""

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self._place = Place.of(str(uri).rstrip("/"))
        if not self._place.path:
            raise StoreError("the table's path is empty")
        self.fs, root = self._place.files()
        self.root = root.rstrip("/")
        self.local = not self._place.scheme
        self._base = self._place.prefix + (
            self.root if self.local else self._place.path.rstrip("/")
        )
        self._query = f"?{self._place.query}" if self._place.query else ""
        self.uri = self._base + self._query
        """The absolute path, or the URI as given."""

    def path(self, relative: str) -> str:
        """Returns the path within this store's file system (without a scheme)."""
        return f"{self.root}/{relative}"

    def url(self, relative: str) -> str:
        """Returns an absolute path, or a URI, for readers without this store."""
        return f"{self._base}/{relative}{self._query}"

    def relative(self, url: str) -> str:
        """Returns the relative path of a result of `url`."""
        return url.removesuffix(self._query)[len(self._base) + 1 :]

    def spark_url(self, relative: str) -> str:
        """Returns the name for Spark, which uses Hadoop's name for S3 and its own connection options."""
        if self.local:
            base = self.root
        elif self._base.startswith("s3://"):
            base = f"s3a{self._base[2:]}"
        else:
            base = self._base
        return f"{base}/{relative}"

    @property
    def delta(self) -> dict[str, Any]:
        """The arguments with which delta-rs opens this place."""
        return self._place.delta

    def size(self, relative: str) -> int | None:
        """Returns the number of bytes of a file, or None if there is no such file."""
        info = self.fs.get_file_info(self.path(relative))
        return info.size if info.type == pafs.FileType.File else None

    def files(self, relative: str) -> list[str]:
        """Lists all files under a folder, sorted, relative to the root. Only for checks and for a job's own output."""
        selector = pafs.FileSelector(self.path(relative), allow_not_found=True, recursive=True)
        return sorted(
            i.path[len(self.root) + 1 :]
            for i in self.fs.get_file_info(selector)
            if i.type == pafs.FileType.File
        )

    def digest(self, relative: str) -> str:
        """Returns the SHA-256 of a file, which is read in pieces."""
        digest = hashlib.sha256()
        with self.fs.open_input_stream(self.path(relative), buffer_size=0) as stream:
            while piece := stream.read(_CHUNK):
                digest.update(piece)
        return digest.hexdigest()

    def read(self, relative: str) -> bytes:
        def read() -> bytes:
            with self.fs.open_input_stream(self.path(relative)) as stream:
                return bytes(stream.read())

        return patiently(read)

    def write(self, relative: str, content: bytes) -> None:
        """Writes a file so that readers see all of it or nothing. It uses a rename locally, and one put in a bucket."""
        if not self.local:
            with self.fs.open_output_stream(self.path(relative)) as stream:
                stream.write(content)
            return
        local_folder.replace(self.root, relative, content)

    @contextlib.contextmanager
    def parquet(self, relative: str) -> Iterator[pq.ParquetFile]:
        """Opens a Parquet file. What is read of it is compared with its checksums."""
        with self.fs.open_input_file(self.path(relative)) as file:
            yield pq.ParquetFile(file, page_checksum_verification=True)

    def read_table(self, relative: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Returns a whole Parquet file, or those of the columns that it has."""
        content = io.BytesIO(self.read(relative))
        return pq.ParquetFile(content, page_checksum_verification=True).read(columns)

    def write_table(self, relative: str, table: pa.Table) -> None:
        """Writes a Parquet file with checksums, as `write` writes bytes."""
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
        self.write(relative, sink.getvalue())

    def read_json(self, relative: str) -> Any:
        return json.loads(self.read(relative))

    def write_json(self, relative: str, value: Any) -> None:
        self.write(relative, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())

    def remove(self, relative: str) -> None:
        """Removes a file or a folder that a job wrote, if it exists. Follows no link."""
        if self.local:
            local_folder.remove(self.root, relative)
            return
        info = self.fs.get_file_info(self.path(relative))
        if info.type == pafs.FileType.Directory:
            self.fs.delete_dir(self.path(relative))
        elif info.type == pafs.FileType.File:
            self.fs.delete_file(self.path(relative))

    def modified(self, relative: str) -> float:
        """Returns the time of a file's last write in seconds since 1970, or now if it is not known."""
        info = self.fs.get_file_info(self.path(relative))
        return info.mtime.timestamp() if info.mtime is not None else time.time()

    def listed(self, relative: str) -> tuple[list[str], list[str]]:
        """Lists all files under a folder that are reached without a link, and the links. A bucket has no links."""
        return (
            local_folder.listed(self.root, relative) if self.local else (self.files(relative), [])
        )

    def remove_if_empty(self, relative: str) -> bool:
        """Removes a local folder if it is empty. Returns whether it did. A bucket has no folders."""
        return self.local and local_folder.remove_if_empty(self.root, relative)

    def probe(self) -> None:
        """Raises StoreError if a table could not be published here. Leaves nothing: the job may still be refused."""
        name, text = f"_sluice/probe-{uuid.uuid4().hex}", b"may I write here?\n"
        above = self.path("_sluice")
        try:
            while self.local and not os.path.lexists(above):
                above = os.path.dirname(above)
            if self.local:
                with tempfile.TemporaryFile(dir=above) as file:
                    file.write(text)
            else:
                self.write(name, text)
                self.remove(name)
        except OSError as error:
            raise StoreError(
                f"{self.uri}: cannot be written ({error.strerror or error}); "
                "make it writable, or choose another --output"
            ) from None


def folder_of(job: str) -> str:
    """Returns the folder of a job's data files."""
    return f"data/{job}"


def job_of(path: str) -> str:
    """Returns the job that wrote a data file, or an empty string for other files."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "data" else ""


def folder_of_tails(job: str, name: str = "") -> str:
    """Returns the folder of all tails of a job, or of one."""
    return f"_sluice/serving/{job}/{quote(name, safe='')}".rstrip("/")


def tail_of_join(number: int) -> str:
    """Returns the name of a join's tail. No history has it, because a column's name cannot begin with `_`."""
    return f"_join{number}"
