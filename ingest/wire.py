"""What crosses between a rank and its workers: small JSON messages, arrays in shared memory, errors as text.

Used on both sides, so it imports nothing but numpy and the standard library. Nothing is pickled. A message is one
datagram of a socket pair, so half of one is never seen; whatever may be long lies in the shared memory instead.
"""

from __future__ import annotations

import json
import math
import socket
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGN = 64
_MESSAGE_BYTES = 2**17
_TEXT, _TRACE = 2_000, 12_000  # characters of an error's text and of its traceback that cross

Columns = Mapping[str, npt.NDArray[Any]]


class Gone(Exception):
    """The other side has closed its end, or died."""


def send(sock: socket.socket, message: Mapping[str, Any], fds: list[int] | None = None) -> None:
    data = json.dumps(message).encode()
    try:
        socket.send_fds(sock, [data], fds or [])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Gone from error


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    try:
        data, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 8)
    except ConnectionResetError as error:
        raise Gone from error
    if not data:
        raise Gone
    return json.loads(data), list(fds)


class Layout:
    """Where arrays lie in a region, one behind the other, and behind them the list that says so."""

    def __init__(self, columns: Columns, start: int = 0, lying: Mapping[int, list[Any]] | None = None):
        """`lying` has the places of arrays (by id) that are in the region already: those stay where they are."""
        self._new: list[tuple[list[Any], npt.NDArray[Any]]] = []
        self.places: dict[str, list[Any]] = {}
        at = -(-start // _ALIGN) * _ALIGN
        for name, array in columns.items():
            if array.dtype.hasobject or array.dtype.names:
                raise TypeError(f"column {name!r} is of dtype {array.dtype}: process workers carry numbers, dates and "
                                "fixed-size bytes; use backend=thread for others")
            if lying and id(array) in lying:
                self.places[name] = lying[id(array)]
            else:
                self.places[name] = [array.dtype.str, list(array.shape), at]
                self._new.append((self.places[name], array))
                at = -(-(at + array.nbytes) // _ALIGN) * _ALIGN
        self._index = json.dumps(self.places).encode()
        self._at = at
        self.size = at + len(self._index)

    def write(self, region: npt.NDArray[np.uint8]) -> list[int]:
        """Copies what is new into the region; returns what `read` needs."""
        for place, array in self._new:
            np.copyto(_view(region, *place), array)
        region[self._at:self.size] = np.frombuffer(self._index, np.uint8)
        return [self._at, self.size]


def read(region: npt.NDArray[np.uint8], index: list[int]) -> tuple[dict[str, npt.NDArray[Any]], dict[str, list[Any]]]:
    """The arrays, as views on the region, and their places."""
    places = json.loads(region[index[0]:index[1]].tobytes())
    return {name: _view(region, *place) for name, place in places.items()}, places


def _view(region: npt.NDArray[np.uint8], dtype: str, shape: list[int], at: int) -> npt.NDArray[Any]:
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    return region[at:at + size].view(kind).reshape(shape) if size else np.empty(shape, kind)


def describe(error: BaseException) -> dict[str, Any]:
    """An error as plain text of bounded length, whatever it is made of."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(its text cannot be made: {type(second).__name__})"
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:
        trace = "".join(traceback.format_tb(error.__traceback__))
    kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    return {"type": type(error).__name__[:200], "text": _cut(text, _TEXT), "trace": _cut(trace, _TRACE),
            "kinds": [kind[:200] for kind in kinds[:20]]}


def _cut(text: str, most: int) -> str:
    """Its beginning and its end: of a traceback, both tell."""
    if len(text) <= most:
        return text
    return f"{text[:most // 2]}\n… {len(text) - most} characters left out …\n{text[-(most // 2):]}"
