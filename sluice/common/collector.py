"""Keeps Python's garbage collector away from imports: `without_collections`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Returns a context without garbage collections.

    Use it for imports before a long run. Modules live as long as the program, but collections during their import would
    visit their objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
