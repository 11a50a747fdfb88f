"""Text input in pieces for threads: `Piece`, about 16 MiB of whole lines of one file.

A line belongs to the piece in which it begins. A plain file is cut by byte ranges, which the threads read themselves. A
compressed file is read from its beginning, while pieces are handed out.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.lines import are_headers
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.local.input_paths import InputFile

PIECE_BYTES = 16 << 20
_CHUNK = 1 << 20
_MARK = b"\xef\xbb\xbf"
_BEYOND = 1 << 16  # what is read beyond a piece for the end of its last line
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
SPARK_ONLY = (".lz4", ".snappy", ".lzo", ".deflate")
# What Arrow says of damage, and Spark's jobs say it in these words.
_FAULTS = {
    "Truncated": "it is cut short",
    "": "it is damaged",
    "incorrect header check": "it is no gzip file, or something else follows its end",
}


class Room:
    """Memory for pieces, which threads use again. Fresh memory costs a page fault for every page."""

    def __init__(self, size: int) -> None:
        self._size, self._free = size, deque[bytearray]()

    @contextlib.contextmanager
    def taken(self) -> Iterator[bytearray]:
        try:
            room = self._free.pop()
        except IndexError:
            room = bytearray(self._size)
        try:
            yield room
        finally:
            self._free.append(room)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file's lines."""

    file: InputFile
    number: int  # in its file
    size: int  # in bytes of its file
    room: Room
    start: int = 0
    content: bytes | None = None  # the lines, if they have been read

    def batches(self, headers: tuple[bytes, ...]) -> Iterator[pa.RecordBatch]:
        """Yields its lines, with their ends, as a column `line`, without repeated headers. They lie in the piece's
        memory, which is used again afterwards."""
        with (
            self.room.taken()
            if self.content is None
            else contextlib.nullcontext(bytearray()) as room
        ):
            content = memoryview(self._read(room) if self.content is None else self.content)
            content = (
                content[len(_MARK) :]
                if not self.number and content[: len(_MARK)] == _MARK
                else content
            )
            if len(
                content
            ):  # lines are laid over the bytes, which are not copied unless the last line has no end
                whole = content if content[-1] == ord("\n") else memoryview(bytes(content) + b"\n")
                ends = _ends(np.frombuffer(whole, np.uint8))
                offsets = pa.py_buffer(np.concatenate([[0], ends]).astype(np.int32))
                lines = pa.Array.from_buffers(
                    pa.binary(), len(ends), [None, offsets, pa.py_buffer(whole)]
                )
                yield _without(headers, pa.record_batch([lines], ["line"]))

    def _read(self, room: bytearray) -> memoryview | bytes:
        """Returns the bytes of the lines that begin in this part of a plain file."""
        with self.file.open() as stream, memoryview(room) as whole:
            before = min(1, self.start)  # the line that began before ends here at the earliest
            stream.seek(self.start - before)
            end, count = before + self.size, 0
            while got := stream.readinto(whole[count : end + _BEYOND]):
                count += got
            first = room.find(b"\n", 0, min(count, end - 1)) + 1 if before else 0
            if before and not first:  # a line that began before is longer than this
                return b""
            last = room.find(b"\n", end - 1, count) + 1
            return (
                memoryview(room)[first:last]
                if last
                else bytes(whole[first:count]) + _to_line_end(stream)
            )


def pieces_of(files: list[InputFile], piece_bytes: int) -> Iterator[Piece]:
    room = Room(1 + piece_bytes + _BEYOND)
    for file in files:
        if PurePosixPath(file.path).suffix in _CODECS:
            yield from _decompressed(file, piece_bytes, room)
        else:
            for number, start in enumerate(range(0, file.size, piece_bytes)):
                yield Piece(file, number, min(piece_bytes, file.size - start), room, start)


def first_line(file: InputFile, encoding: str) -> str:
    """Returns the first line of a file, without a byte order mark and its end. Raises an InputError if only Spark can
    read it."""
    if file.path.endswith(SPARK_ONLY):
        raise InputError(
            f"{file.name}: is compressed in a way that Spark alone reads; run it with --engine spark"
        )
    with file.open() as stream:
        held = b""
        for chunk in _chunks(file, stream):
            held += chunk
            if b"\n" in chunk:
                break
    lines = held.decode(encoding, errors="replace").removeprefix("\ufeff").splitlines()
    return lines[0] if lines else ""


def _ends(content: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Returns where each line ends. It looks at short parts, so that the comparison stays in a core's cache."""
    return np.concatenate(
        [
            np.flatnonzero(content[start : start + _CHUNK // 4] == ord("\n")) + (start + 1)
            for start in range(0, len(content), _CHUNK // 4)
        ]
    )


def _without(headers: tuple[bytes, ...], batch: pa.RecordBatch) -> pa.RecordBatch:
    found = are_headers(batch["line"], headers)
    return batch.filter(pa.array(~found)) if found.any() else batch


def _to_line_end(stream: Any) -> bytes:
    """Returns a file's bytes from here to the end of the line, including the end."""
    held = b""
    while b"\n" not in held and (chunk := stream.read(_CHUNK // 16)):
        held += chunk
    return held[: held.find(b"\n") + 1] or held


def _decompressed(file: InputFile, piece_bytes: int, room: Room) -> Iterator[Piece]:
    with file.open() as stream:
        held = bytearray()
        number = 0
        before = 0
        for chunk in _chunks(file, stream):
            held += chunk
            cut = held.rfind(b"\n") + 1 if len(held) >= piece_bytes else 0
            if cut:
                yield Piece(file, number, stream.tell() - before, room, content=bytes(held[:cut]))
                held = held[cut:]
                number = number + 1
                before = stream.tell()
        if held:
            yield Piece(file, number, file.size - before, room, content=bytes(held))


def _chunks(file: InputFile, stream: Any) -> Iterator[bytes]:
    """Yields a file's text."""
    codec = _CODECS.get(PurePosixPath(file.path).suffix)
    if codec is None or not file.size:
        yield from iter(lambda: stream.read(_CHUNK), b"")
        return
    try:
        plain = pa.CompressedInputStream(stream, codec)
        yield from iter(lambda: plain.read(_CHUNK), b"")
    except OSError as error:
        words = _FAULTS[max((what for what in _FAULTS if what in str(error)), key=len)]
        raise JobFailure(
            f"{file.name}: {words}: copy it here anew ({error}); nothing was published"
        ) from error
