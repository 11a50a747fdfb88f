"""Messages between a loader and a remote worker: a head in JSON, and arrays as they lie in memory, with their CRC-32.

A request and its answer have this one form, for rows and for functions. The arrays have the form that worker processes
of this host get, and are checked by the same code. Nothing is compressed, so the length of a message says what it
takes. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from sluice.common.errors import UsageError
from sluice.common.extras import DISTRIBUTION
from sluice.ingest.columns import ColumnError
from sluice.ingest.errors import LoadingError, SourceError
from sluice.ingest.process import protocol

Head = Mapping[str, Any]
Arrays = Mapping[str, npt.NDArray[Any]]

_FRAME_BYTES = 200
"""The most bytes of a message beside its head and its arrays."""
_PIECE_BYTES = 2**20
PIECE_LIMIT = 4 * _PIECE_BYTES
"""The most bytes of one piece of an answer. A connection refuses longer ones before it takes them."""
_ERROR_LENGTH = 4000  # characters of an error's text that are sent


class RemoteError(LoadingError):
    """Something that remote workers cannot do, or did wrong. The message names the worker and says what to do."""


class WrongAnswer(Exception):
    """An answer is not what was requested, or was damaged on its way. The message says how."""


SENT_ERRORS: Mapping[str, type[Exception]] = {
    "source": SourceError,
    "column": ColumnError,
    "damaged": WrongAnswer,
    "other": RemoteError,
}
"""The types of errors that are sent. All others become a RemoteError."""


@dataclass(frozen=True, eq=False)
class Request:
    """What workers are asked for, and how their answer is read."""

    action: str
    """`read` or `call`."""
    kind: str
    """Requests of one kind take about equally long for each row."""
    description: str
    """What is asked for, for messages."""
    rows: int
    body: pa.Buffer
    most_bytes: int
    """How long an answer may be."""
    result: Callable[[Head, Arrays], Any]
    """Returns what an answer holds. Raises `WrongAnswer`, or the error of a function."""


@cache  # every message holds it, and it is read from a file
def package() -> str:
    return metadata.version(DISTRIBUTION)


def answer(request: pa.Buffer, act: Callable[[Head, Arrays], tuple[Head, Arrays]]) -> pa.Buffer:
    """Returns the answer to a request, whose head and arrays `act` gets. If that raises an error, the error is the
    answer."""
    try:
        about, result = act(*decode(request))
    except Exception as error:
        kinds = (name for name, kind in SENT_ERRORS.items() if isinstance(error, kind))
        kind = next(kinds, "other")
        is_known = isinstance(error, (UsageError, WrongAnswer))
        text = str(error) if is_known else f"{type(error).__name__}: {error}"
        about, result = {"failed": [kind, text[:_ERROR_LENGTH]]}, {}
    return encode({"request": _sum_of(request), **about}, result)


def read_answer(body: pa.Buffer, request: pa.Buffer) -> tuple[Head, Arrays]:
    """Decodes the answer to a request, or raises the error that it holds. Raises `WrongAnswer` if it is that to another
    one."""
    head, arrays = decode(body)
    if head.get("request") != _sum_of(request):
        raise WrongAnswer("an answer to another request")
    if "failed" in head:
        match head["failed"]:
            case [str(kind), str(text)] if kind in SENT_ERRORS:
                raise SENT_ERRORS[kind](text)
        raise WrongAnswer("an error without its kind and text")
    return head, arrays


def _sum_of(request: pa.Buffer) -> int:
    """CRC-32 of a request's head, which says what is asked for and holds the checksum of the arrays."""
    data = memoryview(request)
    return crc32(data[-4 - int.from_bytes(data[-4:], "little") :])


def cut(body: pa.Buffer) -> Iterator[pa.Buffer]:
    """Yields the pieces in which an answer is sent, so that its receiver can stop before it has taken too much."""
    for at in range(0, body.size, _PIECE_BYTES):
        yield body[at : at + _PIECE_BYTES]


def encode(head: Head, arrays: Arrays) -> pa.Buffer:
    """Encodes arrays, one after the other, and a head."""
    layout, own = protocol.RegionLayout(arrays), json.dumps(head)
    room = np.empty(layout.size + len(own) + _FRAME_BYTES, np.uint8)
    index = layout.write(room[: layout.size])
    total = crc32(room[: layout.size].data)
    text = f'{{"package": "{package()}", "index": {index}, "sum": {total}, "head": {own}}}'.encode()
    end = np.frombuffer(text + len(text).to_bytes(4, "little"), np.uint8)
    room[layout.size : layout.size + end.size] = end
    return pa.py_buffer(room[: layout.size + end.size])


def decode(body: pa.Buffer) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Decodes what `encode` encoded. Raises `WrongAnswer` if the bytes are not valid, or if another version of sluice
    has encoded them."""
    try:
        data = np.frombuffer(body, np.uint8)
        size = data.size - 4 - int.from_bytes(data[-4:].tobytes(), "little")
        frame = json.loads(data[size:-4].tobytes())
        if frame["package"] != package():
            raise WrongAnswer(
                f"a message of sluice {frame['package']} came to sluice {package()}; install the same version on both "
                "sides"
            )
        if frame["index"][1] != size or crc32(data[:size].data) != frame["sum"]:
            raise ValueError("values that differ from their checksum (CRC-32)")
        arrays = protocol.read(data[:size], frame["index"])[0]
        if sum(array.nbytes for array in arrays.values()) > size:
            raise ValueError("columns that share their bytes")
        return dict(frame["head"]), arrays
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise WrongAnswer(
            f"a message was damaged on its way, or is of another version than sluice {package()}: {error}"
        ) from None
