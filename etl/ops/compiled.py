"""Compiles functions by numba: `compile_function`. Only a loader needs numba, so it is imported when it is used."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

_LOADING = threading.Lock()


def compile_function(function: Callable[..., Any]) -> Any:
    """Compiles a function to run without the interpreter's lock. Numba keeps the code next to the sources, or in the
    user's cache. If it can write to neither, each process compiles again."""
    from numba import njit

    _load_without_scipy()
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no folder that it can write to
        _warn_uncached()
        return njit(nogil=True)(function)


def _load_without_scipy() -> None:
    """Loads the part of numba that imports all of SciPy's linear algebra, only to see whether it is installed.

    Numba still imports it when a function needs it. A numba that checks in another way only starts more slowly."""
    with contextlib.suppress(ImportError, AttributeError), _LOADING:
        from numba.np import linalg

        check = linalg.ensure_blas
        linalg.ensure_blas = lambda: None
        try:
            import numba.np.arraymath  # noqa: F401
        finally:
            linalg.ensure_blas = check


@cache
def _warn_uncached() -> None:
    print(
        "sluice: this process compiles its inner loops again, which takes seconds, because it cannot write next to its "
        "sources or into the user's cache; set NUMBA_CACHE_DIR to a folder that it can write to",
        file=sys.stderr,
        flush=True,
    )
