"""Calls of a transform's function on a remote worker: `Call` sends a batch, and `Functions` answers.

Numbers are sent as they lie in memory, with their CRC-32. The function is named, with a hash of its module's source.
Columns that it left unchanged are not sent back."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from zlib_ng.zlib_ng import crc32

from sluice.etl.spec.permission import Permission
from sluice.ingest.flow.number_types import same_bytes
from sluice.ingest.process import protocol
from sluice.ingest.process.child_main import load, new_columns
from sluice.ingest.process.worker import FunctionError
from sluice.ingest.remote.unit import RemoteError, WrongAnswer, check_package, package

_HEAD_BYTES = 2**18  # an error's text and traceback
_PIECE_BYTES = 2**20
PIECE_LIMIT = 4 * _PIECE_BYTES
"""The most bytes of one piece of an answer. A connection refuses longer ones before it takes them."""
_LEAST_ANSWER_BYTES, _GROWTH = 2**26, 8


@cache
def source_digest(function: str) -> str:
    """Returns a hash of the whole source of the module that defines `module:function`."""
    loaded = load(function)
    try:
        text = inspect.getsource(sys.modules[inspect.unwrap(loaded).__module__])
    except (AttributeError, KeyError, OSError, TypeError):
        raise RemoteError(
            f"{function}: there is no source of it in Python, so two hosts cannot check that they have "
            "the same function; call it from a function of your own"
        ) from None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Call:
    """A function and the columns of the batch that it is called with."""

    counted: ClassVar[str] = "calls"
    kind: str
    """The function, as `module:function`."""
    source: str
    arrays: Mapping[str, npt.NDArray[Any]]
    description: str
    """The batch's description for messages."""
    rows: int

    def request(self) -> pa.Buffer:
        return encode(
            {"package": package(), "function": self.kind, "source": self.source}, self.arrays
        )

    @property
    def most_bytes(self) -> int:
        """How long an answer may be. A function may enlarge bags."""
        given = sum(array.nbytes for array in self.arrays.values())
        return _LEAST_ANSWER_BYTES + _GROWTH * given

    def answer(self, body: pa.Buffer, request: pa.Buffer) -> dict[str, npt.NDArray[Any]]:
        """Returns the changed columns, or raises the function's error."""
        head, arrays = decode(body)
        if head.get("request") != _head_sum(request):
            raise WrongAnswer("an answer to another call")
        if "error" in head:
            raise FunctionError.of(self.description, head["error"])
        return arrays


class Functions:
    """Calls functions for loaders, if they are allowed and their source is the same on this host."""

    def __init__(self, permission: Permission):
        self._known = cache(lambda name: (permission.load(name, "a loader"), source_digest(name)))
        # Importing may take seconds, and the first call should not wait for it.
        for name in permission.functions:
            with contextlib.suppress(Exception):  # a call of the function raises the error
                self._known(name)

    def answer(self, body: pa.Buffer) -> pa.Buffer:
        head, given = decode(body)
        check_package(head.get("package"))
        name, theirs = head.get("function"), head.get("source")
        if not (isinstance(name, str) and isinstance(theirs, str)):
            raise WrongAnswer("a call must name its function and its source")
        function, own = self._known(name)
        if own != theirs:
            raise RemoteError(
                f"function {name}: the worker has another source of its module than the loader ({own} here, "
                f"{theirs} there); install the same version on both, and restart the worker"
            )
        try:
            arrays = {name: array.copy() for name, array in given.items()}
            arrays |= new_columns(function, arrays)
            return encode(
                {"request": _head_sum(body)},
                {
                    name: array
                    for name, array in arrays.items()
                    if name not in given or not same_bytes(array, given[name])
                },
            )
        except BaseException as error:  # sys.exit() in a user's function counts as an error too
            return encode({"request": _head_sum(body), "error": protocol.describe(error)}, {})


def _head_sum(request: pa.Buffer) -> int:
    """CRC-32 of a call's head, which names the function and holds the checksum of the values."""
    data = memoryview(request)
    return crc32(data[-4 - int.from_bytes(data[-4:], "little") :])


def cut(body: pa.Buffer) -> Iterator[pa.Buffer]:
    """Yields the pieces in which an answer is sent, so that its receiver can stop before it has taken too much."""
    for at in range(0, body.size, _PIECE_BYTES):
        yield body[at : at + _PIECE_BYTES]


def encode(head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> pa.Buffer:
    """Encodes arrays, one after the other, and a head in JSON."""
    layout = protocol.RegionLayout(arrays)
    room = np.empty(layout.size + _HEAD_BYTES, np.uint8)
    index = layout.write(room[: layout.size])
    text = json.dumps({**head, "index": index, "sum": crc32(room[: layout.size].data)}).encode()
    end = np.frombuffer(text + len(text).to_bytes(4, "little"), np.uint8)
    room[layout.size : layout.size + end.size] = end
    return pa.py_buffer(room[: layout.size + end.size])


def decode(body: pa.Buffer) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Decodes what `encode` encoded. Raises `WrongAnswer` if the bytes are not valid."""
    try:
        data = np.frombuffer(body, np.uint8)
        size = data.size - 4 - int.from_bytes(data[-4:].tobytes(), "little")
        head = json.loads(data[size:-4].tobytes())
        if head["index"][1] != size or crc32(data[:size].data) != head["sum"]:
            raise ValueError("values that differ from their checksum (CRC-32)")
        arrays = protocol.read(data[:size], head["index"])[0]
        if sum(array.nbytes for array in arrays.values()) > size:
            raise ValueError("columns that share their bytes")
        return head, arrays
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise WrongAnswer(f"a call or an answer was damaged on its way: {error}") from None
