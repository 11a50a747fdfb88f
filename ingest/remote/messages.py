"""Messages between a loader and a remote worker: a head in JSON, and arrays as they lie in memory, with their CRC-32.

A request and its answer have this one form, for rows and for functions. The arrays have the form that worker processes
of this host get, and are checked by the same code. Nothing is compressed, so the length of a message says what it
takes. Nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from zlib_ng.zlib_ng import crc32

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


class RemoteError(LoadingError):
    """Something that remote workers cannot do, or did wrong. The message names the worker and says what to do."""


class WrongAnswer(Exception):
    """An answer is not what was requested, or was damaged on its way. The message says how."""


KINDS: Mapping[str, type[Exception]] = {
    "source": SourceError,
    "column": ColumnError,
    "damaged": WrongAnswer,
}
"""The errors that keep their type when they are sent. All others become a RemoteError."""


@cache  # every message holds it, and it is read from a file
def package() -> str:
    return metadata.version(DISTRIBUTION)


def answer(request: pa.Buffer, act: Callable[[Head, Arrays], tuple[Head, Arrays]]) -> pa.Buffer:
    """Returns the answer to a request, whose head and arrays `act` gets."""
    about, result = act(*decode(request))
    return encode({"request": _sum_of(request), **about}, result)


def read_answer(body: pa.Buffer, request: pa.Buffer) -> tuple[Head, Arrays]:
    """Decodes the answer to a request. Raises `WrongAnswer` if it is that to another one."""
    head, arrays = decode(body)
    if head.get("request") != _sum_of(request):
        raise WrongAnswer("an answer to another request")
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
    """Decodes what `encode` encoded. Raises `WrongAnswer` if the bytes are not valid, and RemoteError if another
    version of sluice has encoded them."""
    try:
        data = np.frombuffer(body, np.uint8)
        size = data.size - 4 - int.from_bytes(data[-4:].tobytes(), "little")
        frame = json.loads(data[size:-4].tobytes())
        if frame["package"] != package():
            raise RemoteError(
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
