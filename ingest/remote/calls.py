"""Calls of a transform's function on a remote worker: `request_call` sends a batch, and `Functions` answers.

The function is named, with a hash of its module's source. Columns that it left unchanged are not sent back."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from functools import cache

from sluice.etl.spec.permission import Permission
from sluice.ingest.flow.number_types import same_bytes
from sluice.ingest.process import protocol
from sluice.ingest.process.child_main import load, new_columns
from sluice.ingest.process.worker import FunctionError
from sluice.ingest.remote.messages import (
    Arrays,
    Head,
    RemoteError,
    Request,
    WrongAnswer,
    encode,
)

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


def request_call(function: str, arrays: Arrays, where: str) -> Request:
    """Asks for a call of `module:function` with the columns of a batch, which `where` names in messages."""

    def changed(head: Head, arrays: Arrays) -> Arrays:
        """Returns the changed columns, or raises the function's error."""
        if "error" in head:
            raise FunctionError.of(where, head["error"])
        return arrays

    return Request(
        "call",
        function,
        where,
        rows=max((array.shape[0] for array in arrays.values()), default=0),
        body=encode({"function": function, "source": source_digest(function)}, arrays),
        # A function may enlarge bags.
        most_bytes=_LEAST_ANSWER_BYTES + _GROWTH * sum(array.nbytes for array in arrays.values()),
        result=changed,
    )


class Functions:
    """Calls functions for loaders, if they are allowed and their source is the same on this host."""

    def __init__(self, permission: Permission):
        self._known = cache(lambda name: (permission.load(name, "a loader"), source_digest(name)))
        # Importing may take seconds, and the first call should not wait for it.
        for name in permission.functions:
            with contextlib.suppress(Exception):  # a call of the function raises the error
                self._known(name)

    def call(self, head: Head, given: Arrays) -> tuple[Head, Arrays]:
        """Returns the head and the columns of an answer."""
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
            changed = {
                name: array
                for name, array in arrays.items()
                if name not in given or not same_bytes(array, given[name])
            }
            protocol.RegionLayout(changed)  # refuses types that cannot be sent
            return {}, changed
        except BaseException as error:  # sys.exit() in a user's function counts as an error too
            return {"error": protocol.describe(error)}, {}
