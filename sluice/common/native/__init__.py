"""Calls the compiled inner loops of `kernel.c`: `call_kernel`.

The library lies beside this module and carries the digest of its sources. It runs without the interpreter's lock. It
uses no API of Python, so one library serves every Python.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sluice.common.errors import UsageError

SOURCE = Path(__file__).with_name("kernel.c")
LIBRARY = SOURCE.with_name("kernel.so")
_BUILD = "python kernel_build.py"
_ARGUMENTS = {
    "check_heads": 2,
    "compose_order": 5,
    "copy_bags": 5,
    "cut_lines": 12,
    "encode_texts": 7,
    "find_pages": 6,
    "gather_texts": 5,
    "hash_digits": 5,
    "hash_texts": 6,
    "is_complete": 3,
    "place_rows": 1,
    "read_indices": 4,
    "thrift_numbers": 6,
    "unpack_page": 6,
}
"""How many arguments each function takes. All are numbers of 64 bits."""


class KernelError(UsageError):
    """The compiled inner loops are missing, or were built from other sources."""


def has_kernel() -> bool:
    """Returns whether the compiled inner loops are there, as they are not on a cluster's workers that run from a zip
    file. Raises KernelError if they were built from other sources, because they may compute other values."""
    return bool(_functions())


def require_kernel() -> None:
    """Raises KernelError if the compiled inner loops cannot be used."""
    if not has_kernel():
        raise KernelError(
            f"{LIBRARY} is missing, and the loader needs its compiled inner loops; install Sluice from a wheel, or "
            f"build them in a checkout: {_BUILD}"
        )


def call_kernel(name: str, *arguments: Any) -> int:
    """Calls a function of `kernel.c`. An array is passed as the address of its first element, and must be contiguous.
    None is passed as the address 0."""
    require_kernel()
    words = [_as_word(argument) for argument in arguments]
    result: int = _functions()[name](*words)
    return result


def _as_word(argument: Any) -> int:
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise ValueError("the kernel takes contiguous arrays only")
        return argument.ctypes.data
    return 0 if argument is None else int(argument)


@cache
def _functions() -> Mapping[str, Any]:
    """Returns the functions by name. Empty: there is no library."""
    if not LIBRARY.is_file():
        return {}
    library = ctypes.CDLL(str(LIBRARY))
    digest = (ctypes.c_char * 32).in_dll(library, "source_digest").value.decode()
    if digest != hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:32]:
        raise KernelError(
            f"{LIBRARY} was built from other sources than {SOURCE}, so it may compute other values; build it again in "
            f"the checkout: {_BUILD}"
        )
    functions = {}
    for name, count in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_int64] * count, ctypes.c_int64
        functions[name] = function
    return functions
