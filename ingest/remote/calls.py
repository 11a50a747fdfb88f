"""Calls of a transform's function on a remote worker: `Call` sends a batch, and `Functions` answers.

The function is named, with a hash of its module's source. Columns that it left unchanged are not sent back."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt
import pyarrow as pa

from sluice.etl.spec.permission import Permission
from sluice.ingest.flow.number_types import same_bytes
from sluice.ingest.process import protocol
from sluice.ingest.process.child_main import load, new_columns
from sluice.ingest.process.worker import FunctionError
from sluice.ingest.remote.messages import Arrays, Head, RemoteError, WrongAnswer, encode

if TYPE_CHECKING:
    from sluice.ingest.remote.unit import RemoteJob

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

    action: ClassVar[str] = "call"
    counted: ClassVar[str] = "calls"
    kind: str
    """The function, as `module:function`."""
    source: str
    arrays: Mapping[str, npt.NDArray[Any]]
    description: str
    """The batch's description for messages."""
    rows: int

    def request(self, _job: RemoteJob) -> pa.Buffer:
        return encode({"function": self.kind, "source": self.source}, self.arrays)

    def most_bytes(self, _job: RemoteJob, _expected: int) -> int:
        """Returns how long an answer may be. A function may enlarge bags."""
        given = sum(array.nbytes for array in self.arrays.values())
        return _LEAST_ANSWER_BYTES + _GROWTH * given

    def result(self, head: Head, arrays: Arrays, _job: RemoteJob) -> Arrays:
        """Returns the changed columns, or raises the function's error."""
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
