"""Text input in pieces that threads take: `Piece`, about 16 MiB of whole lines of one file.

A line belongs to the piece in which it begins. A plain file is cut by byte ranges, which the threads read themselves; a
compressed one is read through from its beginning, by whoever hands out the pieces."""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.etl.apply.lines import bare
from sluice.etl.common.errors import InputError
from sluice.etl.local.failures import of_stream
from sluice.etl.local.places import InputFile

PIECE_BYTES = 16 << 20
_CHUNK = 1 << 20
_MARK = b"\xef\xbb\xbf"
_COMPRESSED = (".gz", ".bz2", ".zst", ".deflate")
_SPARK_ONLY = (".lz4", ".snappy", ".lzo")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file's lines."""

    file: InputFile
    number: int
    """Its number in its file."""
    size: int
    """Its bytes in the file, to tell how far a pass is."""
    start: int = 0
    content: bytes | None = None
    """The lines, if they have been read."""

    def batches(self, header: bytes) -> Iterator[pa.RecordBatch]:
        """Its lines, with their ends, as a column `line`; those that repeat the header are left out."""
        content = self.content if self.content is not None else _lines_of(self)
        if content:
            yield _without(header, as_lines(content))


def pieces_of(files: list[InputFile], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    for file in files:
        if file.name.endswith(_SPARK_ONLY):
            raise InputError(f"{file.name}: is compressed in a way that Spark alone reads; run it with --engine spark")
        if file.name.endswith(_COMPRESSED):
            yield from _decompressed(file, piece_bytes)
            continue
        for number, start in enumerate(range(0, file.size, piece_bytes)):
            yield Piece(file, number, min(piece_bytes, file.size - start), start)


def first_line(file: InputFile) -> str:
    """The first line of a file, without a byte order mark and its end."""
    with file.open() as stream:
        chunks = _chunks(file, stream) if file.name.endswith(_COMPRESSED) else iter(lambda: stream.read(_CHUNK), b"")
        held = b""
        for chunk in chunks:
            held += chunk
            if b"\n" in chunk:
                break
    lines = held.decode(errors="replace").removeprefix("\ufeff").splitlines()
    return lines[0] if lines else ""


def as_lines(content: bytes) -> pa.RecordBatch:
    """Lays lines over bytes, which are not copied unless the last line has no end."""
    whole = content if content.endswith(b"\n") else content + b"\n"
    ends = np.flatnonzero(np.frombuffer(whole, np.uint8) == ord("\n")) + 1
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.record_batch([pa.Array.from_buffers(pa.binary(), len(ends), [
        None, pa.py_buffer(offsets), pa.py_buffer(whole)])], ["line"])


def _without(header: bytes, batch: pa.RecordBatch) -> pa.RecordBatch:
    if not header:
        return batch
    lines = batch["line"]
    like = np.flatnonzero(pa.compute.starts_with(lines, header).to_numpy(zero_copy_only=False)).tolist()
    others = np.ones(len(lines), bool)
    others[[number for number in like if bare(lines[number].as_py()) == header]] = False
    return batch if others.all() else batch.filter(pa.array(others))


def _lines_of(piece: Piece) -> bytes:
    """The bytes of a plain file's lines that begin in a piece."""
    with piece.file.open() as stream:
        start = piece.start
        if start:
            stream.seek(start - 1)
            start += len(_to_line_end(stream)) - 1
        end = piece.start + piece.size
        if start >= end and piece.start:
            return b""
        stream.seek(start)
        content = stream.read(end - start)
        if end < piece.file.size and not content.endswith(b"\n"):
            content += _to_line_end(stream)
        return bytes(content[3:] if not piece.start and content.startswith(_MARK) else content)


def _to_line_end(stream: Any) -> bytes:
    """What a file holds from here up to the end of the line, and with it."""
    held = b""
    while chunk := stream.read(_CHUNK // 16):
        place = chunk.find(b"\n")
        if place >= 0:
            return bytes(held + chunk[:place + 1])
        held += chunk
    return bytes(held)


def _decompressed(file: InputFile, piece_bytes: int) -> Iterator[Piece]:
    with file.open() as stream:
        held, number, before = bytearray(), 0, 0
        for chunk in _chunks(file, stream):
            held += chunk
            cut = held.rfind(b"\n") + 1 if len(held) >= piece_bytes else 0
            if cut:
                at = stream.tell()
                yield Piece(file, number, at - before, content=_first(bytes(held[:cut]), number))
                held, number, before = held[cut:], number + 1, at
        if held:
            yield Piece(file, number, file.size - before, content=_first(bytes(held), number))


def _first(content: bytes, number: int) -> bytes:
    return content.removeprefix(_MARK) if not number else content


def _chunks(file: InputFile, stream: Any) -> Iterator[bytes]:
    try:
        if file.name.endswith(".zst"):
            with pa.CompressedInputStream(stream, "zstd") as plain:
                yield from iter(lambda: plain.read(_CHUNK), b"")
        elif file.name.endswith(".bz2"):
            yield from _members(stream, _Bzip2)
        else:
            yield from _members(stream, lambda: _Deflate(15 if file.name.endswith(".deflate") else 31))
    except (zlib.error, EOFError, OSError) as error:
        raise of_stream(file.name, error) from error


class _Deflate:
    def __init__(self, bits: int) -> None:
        self._inner = zlib.decompressobj(bits)

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Some more of the text, and what of the data is left for the next call."""
        found = self._inner.decompress(data, _CHUNK)
        return found, self._inner.unconsumed_tail

    @property
    def rest(self) -> bytes | None:
        """What follows the end; None if the end is not there yet."""
        return self._inner.unused_data if self._inner.eof else None


class _Bzip2:
    def __init__(self) -> None:
        self._inner = bz2.BZ2Decompressor()

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        return self._inner.decompress(data), b""

    @property
    def rest(self) -> bytes | None:
        return self._inner.unused_data if self._inner.eof else None


def _members(stream: Any, new: Any) -> Iterator[bytes]:
    """The text of a file of one compressed stream after the other, as some programs write them."""
    data = stream.read(_CHUNK)
    while data:
        inner = new()
        while inner.rest is None:
            found, data = inner.feed(data)
            if found:
                yield found
            if inner.rest is None and not data and not (data := stream.read(_CHUNK)):
                raise EOFError("Unexpected end of input stream: truncated")
        data = inner.rest or stream.read(_CHUNK)
