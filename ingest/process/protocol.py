"""The protocol between a rank and its worker processes: small JSON messages, arrays in shared memory, errors as text.

Both sides use it, so it imports only numpy and the standard library. Nothing is pickled. A message is one datagram of a
socket pair, so it arrives whole. Long content goes into shared memory instead.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGN = 64
_MESSAGE_BYTES = 2**17
_GRAIN = 64 * 2**10
_SENDABLE = re.compile(r"[<>|][biufcmMSUV][1-9]\d{0,8}(\[\w+\])?")
"""The types of arrays that are sent, as numpy writes them: numbers, dates and fixed-size bytes or texts."""
_KEPT_INDEX = 2**18
_DIMENSIONS = 32
# The number of characters of an error's text and of its traceback that are sent.
_TEXT, _TRACE = 2_000, 12_000

Array = npt.NDArray[Any]
Columns = Mapping[str, Array]
ROWS = "\0rows"
"""The name under which a function over rows of a row group gets them, in Arrow's form. No column has this name."""


class Gone(Exception):
    """The other side has closed its end, or died."""


class InvalidMessage(ValueError):
    """The other side sent something that no side of this version sends. The message names the field."""


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
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"a message that is no JSON: {error}") from None
    if not isinstance(message, dict):
        raise InvalidMessage(f"{_shown(message)} in place of a message")
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
        self._arrays = columns
        self._places, self._new, self._index, self._at = _arrange(
            tuple(
                (name, array.dtype, array.shape, lying.get(id(array)))
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
    columns: tuple[tuple[str, np.dtype[Any], tuple[int, ...], Place | None], ...], start: int
) -> tuple[dict[str, Place], list[str], bytes, int]:
    """Returns the places, the names of arrays to copy, the index as bytes, and the index's position."""
    places: dict[str, Place] = {}
    new = []
    at = -(-start // _ALIGN) * _ALIGN
    for name, dtype, shape, lies in columns:
        if dtype.hasobject or dtype.names or not _SENDABLE.fullmatch(dtype.str):
            raise TypeError(
                f"column {name!r} is of dtype {dtype}: process workers only take numbers, dates and "
                "fixed-size bytes; use backend=thread for other types"
            )
        places[name] = lies or (dtype.str, shape, at)
        if lies is None:
            new.append(name)
            at = -(-(at + math.prod(shape) * dtype.itemsize) // _ALIGN) * _ALIGN
    return places, new, json.dumps(places).encode(), at


def read(region: Array, index: Any) -> tuple[dict[str, Array], Mapping[str, Place]]:
    """Returns the arrays as views of the region, and their places.

    The other side wrote both. Only places inside the region, of types without pointers, are accepted: numpy checks
    neither an offset below 0 nor what lies where an object should be. Otherwise raises InvalidMessage."""
    if not (isinstance(index, list) and len(index) == 2 and all(map(is_count, index))):
        raise InvalidMessage(f"index: {_shown(index)} is not two positions")
    text = region[index[0] : index[1]].tobytes()
    places, needed = (_parse if len(text) <= _KEPT_INDEX else _parse.__wrapped__)(text)
    if needed > region.size:
        raise InvalidMessage(f"index: {needed} bytes of arrays in a region of {region.size}")
    arrays = {name: _view(region, place) for name, place in places.items()}
    for name, array in arrays.items():
        # numpy counts and copies by masks whose bytes it takes to be 0 or 1.
        if array.dtype == bool and array.view(np.uint8).max(initial=0) > 1:
            raise InvalidMessage(f"column {name!r}: a truth value that is neither 0 nor 1")
    return arrays, places


def refused(reply: Mapping[str, Any]) -> tuple[int, str]:
    """Returns the bytes that a worker could not reserve, and why."""
    match reply["refused"]:
        case [size, str(why)] if is_count(size):
            return size, why
    raise InvalidMessage(
        f"refused: {_shown(reply['refused'])} is not a number of bytes and a reason"
    )


@functools.lru_cache(maxsize=64)
def _parse(index: bytes) -> tuple[dict[str, Place], int]:
    """Returns the places, and where the last of them ends."""
    try:
        given = dict(json.loads(index))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidMessage(f"index: no object of JSON: {error}") from None
    places: dict[str, Place] = {}
    needed = 0
    for name, place in given.items():
        try:
            dtype, shape, at = place
            counts = (
                all(map(is_count, [*shape, at])) and at % _ALIGN == 0 and len(shape) <= _DIMENSIONS
            )
            if not (
                counts and _SENDABLE.fullmatch(dtype) and math.prod(filter(None, shape)) < 2**48
            ):
                raise ValueError
            size = np.dtype(dtype).itemsize * math.prod(shape)
        except (ValueError, TypeError):
            raise InvalidMessage(
                f"column {name!r}: {_shown(place)} is not a type of numbers, a shape and an offset"
            ) from None
        places[name] = dtype, tuple(shape), at
        needed = max(needed, (at + size) * bool(size))
    return places, needed


def is_count(value: Any) -> bool:
    """Whether a value from outside is a whole number that can be a size or a position."""
    return type(value) is int and 0 <= value < 2**48


def _shown(value: Any) -> str:
    return _cut(json.dumps(value), 100)


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
        check_arrow(value, f"column {name!r}")
    return given


def check_arrow(value: Any, what: str) -> None:
    """Raises ValueError if what a function made is an Arrow array, or a pandas column of one, that is not valid.

    Casts and numpy believe its offsets, so one that points elsewhere would end the process. The check takes 2 ms for a
    million lists of numbers, and 10 ms for a million texts. A function in Python takes 100 ms or more."""
    value = getattr(value, "array", value)  # of a pandas Series
    if not (hasattr(value, "__arrow_array__") or type(value).__module__.startswith("pyarrow.")):
        return
    import pyarrow as pa

    try:
        (value if hasattr(value, "validate") else pa.array(value)).validate(full=True)
    except pa.ArrowException as error:
        raise ValueError(f"{what} came back as Arrow that is not valid: {error}") from None


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


def described(error: Any) -> tuple[str, str, str, tuple[str, ...]]:
    """Returns the type, text, trace and kinds of an error that `describe` has described, maybe elsewhere."""
    match error:
        case {"type": str(kind), "text": str(text), "trace": str(trace), "kinds": [*kinds]}:
            if all(isinstance(name, str) for name in kinds):
                return kind, text, trace, tuple(kinds)
    raise InvalidMessage("error: it is not described by type, text, trace and kinds")


def _cut(text: str, most: int) -> str:
    """Shortens a long text. Keeps its beginning and its end, because both parts of a traceback are useful."""
    if len(text) <= most:
        return text
    return (
        f"{text[: most // 2]}\n… {len(text) - most} characters left out …\n{text[-(most // 2) :]}"
    )
