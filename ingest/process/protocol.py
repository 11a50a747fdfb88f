"""The protocol between a rank and its worker processes: small JSON messages, arrays in shared memory, errors as text.

Both sides use it, so it imports only numpy and the standard library. Nothing is pickled. A message is one datagram of a
socket pair, so it arrives whole. Long content goes into shared memory instead.
"""

from __future__ import annotations

import functools
import json
import math
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGN = 64
_MESSAGE_BYTES = 2**17
_GRAIN = 64 * 2**10
# The number of characters of an error's text and of its traceback that are sent.
_TEXT, _TRACE = 2_000, 12_000

Array = npt.NDArray[Any]
Columns = Mapping[str, Array]
ROWS = "\0rows"
"""The name under which a function over rows of a row group gets them, in Arrow's form. No column has this name."""


class Gone(Exception):
    """The other side has closed its end, or died."""


def send(sock: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        sock.sendmsg([json.dumps(message).encode()])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Gone from error


def receive(sock: socket.socket) -> dict[str, Any]:
    try:
        data, *_ = sock.recvmsg(_MESSAGE_BYTES)
    except ConnectionResetError as error:
        raise Gone from error
    if not data:
        raise Gone
    message: dict[str, Any] = json.loads(data)
    return message


def grow(fd: int, size: int) -> int:
    """Reserves at least `size` bytes of a region, and returns how many. Raises OSError if there is no memory."""
    size = (size + size // 8 + _GRAIN) // _GRAIN * _GRAIN  # room for slightly larger items
    os.posix_fallocate(fd, 0, size)
    return size


Place = tuple[str, tuple[int, ...], int]
"""An array's dtype, shape and offset."""


class RegionLayout:
    """Places arrays in a region, one after the other, followed by an index that describes them."""

    def __init__(self, columns: Columns, start: int = 0, lying: Mapping[int, Place] | None = None):
        """`lying` has the places of arrays (by id) that are already in the region. These are not moved."""
        lying = lying or {}
        for name, array in columns.items():
            if array.dtype.hasobject or array.dtype.names:
                raise TypeError(
                    f"column {name!r} is of dtype {array.dtype}: process workers only take numbers, dates and "
                    "fixed-size bytes; use backend=thread for other types"
                )
        self._arrays = columns
        self._places, self._new, self._index, self._at = _arrange(
            tuple(
                (name, array.dtype.str, array.shape, lying.get(id(array)))
                for name, array in columns.items()
            ),
            start,
        )
        self.size = self._at + len(self._index)

    def write(self, region: Array) -> list[int]:
        """Copies the arrays that are not in the region yet. Returns the position of the index, which `read` needs."""
        for name in self._new:
            np.copyto(_view(region, self._places[name]), self._arrays[name])
        region[self._at : self.size] = np.frombuffer(self._index, np.uint8)
        return [self._at, self.size]


# Items of a run have the same columns, so the layout is cached. With 39 columns that halves an item's cost.
@functools.lru_cache(maxsize=64)
def _arrange(
    columns: tuple[tuple[str, str, tuple[int, ...], Place | None], ...], start: int
) -> tuple[dict[str, Place], list[str], bytes, int]:
    """Returns the places, the names of arrays to copy, the index as bytes, and the index's position."""
    places: dict[str, Place] = {}
    new = []
    at = -(-start // _ALIGN) * _ALIGN
    for name, dtype, shape, lies in columns:
        places[name] = lies or (dtype, shape, at)
        if lies is None:
            new.append(name)
            at = -(-(at + math.prod(shape) * np.dtype(dtype).itemsize) // _ALIGN) * _ALIGN
    return places, new, json.dumps(places).encode(), at


def read(region: Array, index: list[int]) -> tuple[dict[str, Array], Mapping[str, Place]]:
    """Returns the arrays as views of the region, and their places."""
    places = _parse(region[index[0] : index[1]].tobytes())
    return {name: _view(region, place) for name, place in places.items()}, places


@functools.lru_cache(maxsize=64)
def _parse(index: bytes) -> dict[str, Place]:
    return {
        name: (dtype, tuple(shape), at) for name, (dtype, shape, at) in json.loads(index).items()
    }


def _view(region: Array, place: Place) -> Array:
    dtype, shape, at = place
    return np.ndarray(shape, dtype, region, at) if 0 not in shape else np.empty(shape, dtype)


def call_function(function: Callable[[Any], Any], columns: dict[str, Any]) -> Any:
    """Calls a function on a dict of columns and returns its result. If it returns None, the result is the columns that
    it replaced in the dict, as in `columns["price"] = columns["price"] / 2`."""
    if ROWS in columns:
        from sluice.ingest.process.row_call import call_on_rows

        return {ROWS: call_on_rows(function, columns[ROWS])}
    got = dict(columns)
    given = function(columns)
    if given is None:
        given = {name: value for name, value in columns.items() if value is not got.get(name)}
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if np.ma.is_masked(value):
            raise ValueError(
                f"column {name!r} came back with masked values; fill them, as with .filled(0)"
            )
    return given


def describe(error: BaseException) -> dict[str, Any]:
    """Describes any error as plain text of limited length."""
    try:
        text = str(error)
    except Exception as second:
        text = f"(its text cannot be made: {type(second).__name__})"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:
        trace = "".join(traceback.format_tb(error.__traceback__))
    kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, BaseException)]
    return {
        "type": type(error).__name__[:200],
        "text": _cut(text, _TEXT),
        "trace": _cut(trace, _TRACE),
        "kinds": [kind[:200] for kind in kinds[:20]],
    }


def _cut(text: str, most: int) -> str:
    """Shortens a long text. Keeps its beginning and its end, because both parts of a traceback are useful."""
    if len(text) <= most:
        return text
    return (
        f"{text[: most // 2]}\n… {len(text) - most} characters left out …\n{text[-(most // 2) :]}"
    )
