"""`Piece`: about 16 MiB of lines of a text file, for a thread.

A line belongs to the piece in which it begins. A plain file is cut by byte ranges, which the threads read. A compressed
file, and one whose records may take several lines, is read from its beginning by the thread that hands out the pieces.
`split_into_tasks` gives each task of a cluster some ranges.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.etl.apply.input_checks import Part
from sluice.etl.apply.lines import record_pattern
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.ops.hashing import MOST_TEXT_BYTES
from sluice.etl.read.input_paths import InputFile

PIECE_BYTES = 16 << 20
_CHUNK = 1 << 20
_MARK = b"\xef\xbb\xbf"
_BEYOND = 1 << 16
"""The number of bytes after a piece that are read to find the end of its last line."""
OPEN_BYTES = 4 << 20
"""To open a file takes about as long as to read so many bytes. Spark calculates with the same figure."""
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
UNREAD = (".lz4", ".snappy", ".lzo", ".deflate")
# Arrow's errors about damaged files, and our words for them.
_FAULTS = {
    "Truncated": "it is cut short",
    "": "it is damaged",
    "incorrect header check": "it is no gzip file, or something else follows its end",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some lines of a file."""

    file: InputFile
    number: int
    """The number of the piece in its file."""
    size: int
    """The number of the file's bytes. They may be compressed."""
    start: int = 0
    content: bytes | None = None
    """The lines, if they were read already."""
    ends: npt.NDArray[np.intp] | None = None
    """The positions after each record, if records may take several lines."""

    @property
    def part(self) -> Part:
        return self.file.name_in_rejects, self.number

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the lines with their ends as a column `line`."""
        content = memoryview(self._read() if self.content is None else self.content)
        ends = self.ends
        if not self.number and content[: len(_MARK)] == _MARK:
            content = content[len(_MARK) :]
            ends = None if ends is None else ends - len(_MARK)
        if len(content):
            # The Arrow array uses these bytes. They are copied only if the last line has no end.
            if content[-1] != ord("\n"):
                content = memoryview(bytes(content) + b"\n")
            if ends is None:
                ends = _line_ends(np.frombuffer(content, np.uint8))
            offsets = pa.py_buffer(np.concatenate([[0], ends]).astype(np.int32))
            lines = pa.Array.from_buffers(
                pa.binary(), len(ends), [None, offsets, pa.py_buffer(content)]
            )
            yield pa.record_batch([lines], ["line"])

    def _read(self) -> memoryview | bytes:
        """Returns the bytes of the lines that begin in this part of a plain file."""
        with self.file.open() as stream:
            # The byte before the piece may be the end of the line before.
            before = min(1, self.start)
            stream.seek(self.start - before)
            end = before + self.size
            content = stream.read(end + _BEYOND)
            first = content.find(b"\n", 0, end - 1) + 1 if before else 0
            if before and not first:  # no line begins in this piece
                return b""
            last = content.find(b"\n", end - 1) + 1
            return (
                memoryview(content)[first:last] if last else content[first:] + _to_line_end(stream)
            )


@dataclass(frozen=True, slots=True)
class FileRange:
    """Some bytes of a file: whole pieces, or all of a file that is read from its beginning."""

    file: InputFile
    start: int
    size: int
    piece_bytes: int
    delimiter: str = ""
    """Of records that may take several lines. Empty: a record is a line."""

    def pieces(self) -> Iterator[Piece]:
        if self.delimiter or is_compressed(self.file):
            yield from _read_in_order(self)
            return
        for start in range(self.start, self.start + self.size, self.piece_bytes):
            size = min(self.piece_bytes, self.file.size - start)
            yield Piece(self.file, start // self.piece_bytes, size, start)


def pieces_of(files: Iterable[InputFile], piece_bytes: int, delimiter: str = "") -> Iterator[Piece]:
    """Yields the pieces of all files."""
    for file in files:
        yield from FileRange(file, 0, file.size, piece_bytes, delimiter).pieces()


def split_into_tasks(
    files: Sequence[InputFile], task_bytes: int, delimiter: str = ""
) -> list[tuple[FileRange, ...]]:
    """Returns the ranges of each task, in the order of the input. A task has about `task_bytes`, or one file that is
    read from its beginning."""
    pieces = -(-task_bytes // PIECE_BYTES)
    piece_bytes = -(-task_bytes // pieces)
    ranges = []
    for file in files:
        whole = delimiter or is_compressed(file)
        step = max(1, file.size) if whole else pieces * piece_bytes
        for start in range(0, file.size, step):
            size = min(step, file.size - start)
            ranges.append(FileRange(file, start, size, piece_bytes, delimiter))
    return pack(ranges, task_bytes)


def pack(parts: Iterable[Any], task_bytes: int) -> list[tuple[Any, ...]]:
    """Returns the parts of each task. A task has about `task_bytes`, or one part. A part counts `OPEN_BYTES` more."""
    tasks: list[list[Any]] = []
    size = task_bytes
    for part in parts:
        cost = part.size + OPEN_BYTES
        if size + cost > task_bytes:
            tasks.append([])
            size = 0
        tasks[-1].append(part)
        size += cost
    return [tuple(task) for task in tasks]


def is_compressed(file: InputFile) -> bool:
    return PurePosixPath(file.path).suffix in _CODECS


def first_line(file: InputFile, encoding: str) -> str:
    """Returns the first line of a file, without a byte order mark and its end."""
    with file.open() as stream:
        collected = b""
        for chunk in _chunks(file, stream):
            collected += chunk
            if b"\n" in chunk:
                break
    lines = collected.decode(encoding, errors="replace").removeprefix("\ufeff").splitlines()
    return lines[0] if lines else ""


def _line_ends(content: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Returns the positions after each line. Searches short parts, so that the comparison stays in a core's cache."""
    return np.concatenate(
        [
            np.flatnonzero(content[start : start + _CHUNK // 4] == ord("\n")) + (start + 1)
            for start in range(0, len(content), _CHUNK // 4)
        ]
    )


def _to_line_end(stream: Any) -> bytes:
    """Returns a file's bytes from here to the end of the line, including the end."""
    collected = b""
    while b"\n" not in collected and (chunk := stream.read(_CHUNK // 16)):
        collected += chunk
    return collected[: collected.find(b"\n") + 1] or collected


def _read_in_order(part: FileRange) -> Iterator[Piece]:
    """Yields the pieces of a whole file."""
    file = part.file
    with file.open() as stream:
        collected = bytearray()
        number = 0
        before = 0
        for chunk in itertools.chain(_chunks(file, stream), (b"",)):
            collected += chunk
            if chunk and len(collected) < part.piece_bytes:
                continue
            ends = None
            if part.delimiter:
                if not chunk and collected and not collected.endswith(b"\n"):
                    collected += b"\n"
                ends = _record_ends(collected, part.delimiter, last=not chunk)
                cut = int(ends[-1]) if len(ends) else 0
            else:
                cut = collected.rfind(b"\n") + 1 if chunk else len(collected)
            if cut:
                place = stream.tell() if chunk else file.size
                content = bytes(collected[:cut])
                yield Piece(file, number, place - before, content=content, ends=ends)
                collected = collected[cut:]
                number += 1
                before = place


def _record_ends(content: bytearray, delimiter: str, *, last: bool) -> npt.NDArray[np.intp]:
    """Returns the positions after each record that ends in the content. Line ends between quotes do not end a record.

    A quote that does not end within `MOST_TEXT_BYTES`, or in the `last` content, is left to its line."""
    record = record_pattern(delimiter)
    ends = list[int]()
    place = 0
    while place < len(content):
        match = record.match(content, place)
        if match is None and not last and len(content) - place <= MOST_TEXT_BYTES:
            break  # the quote may end in what is not read yet
        if match is None or match.end() - place > MOST_TEXT_BYTES:
            place = content.find(b"\n", place) + 1 or len(content)
        else:
            place = match.end()
        ends.append(place)
    return np.array(ends, np.intp)


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
