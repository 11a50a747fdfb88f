"""`RowFile`: a task's parsed rows in a file on the executor's disk."""

from __future__ import annotations

import os
import tempfile
import uuid

import pyarrow as pa


def local_folders() -> list[str]:
    """Returns the folders that Spark sets in its workers, and removes when the executor ends."""
    return os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()).split(",")


class RowFile:
    """A new file for the rows of a task, as an Arrow stream. It is removed if the task fails, or if it has no rows."""

    def __init__(self, task: int) -> None:
        folders = local_folders()
        self.path = f"{folders[task % len(folders)]}/sluice-rows-{uuid.uuid4().hex}"
        self._sink = pa.OSFile(self.path, "wb")
        self._stream: pa.RecordBatchStreamWriter | None = None

    def write(self, rows: pa.RecordBatch) -> None:
        if self._stream is None:
            self._stream = pa.ipc.new_stream(self._sink, rows.schema)
        self._stream.write_batch(rows)

    @property
    def is_empty(self) -> bool:
        return self._stream is None

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._stream is not None and kind is None:
            self._stream.close()
        self._sink.close()
        if kind is not None or self.is_empty:
            os.unlink(self.path)
