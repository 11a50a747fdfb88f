"""Says what went wrong in a local job in one line: `clearly`, with the words that Spark's jobs have."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from collections.abc import Iterator

from sluice.etl.jobs.engine import JobFailure

_SHORT, _DAMAGED = "it is cut short: copy it here anew", "it is damaged: copy it here anew"
_NOT_GZIP = "it is no gzip file, or something else follows its end: copy it here anew"


def of_stream(file: str, error: Exception) -> JobFailure:
    """What a decompressor's error means."""
    text = str(error)
    words = (_SHORT if "runcated" in text or isinstance(error, EOFError) else
             _NOT_GZIP if "incorrect header check" in text else _DAMAGED)
    return JobFailure(f"{file}: {words} ({text}); nothing was published")


@contextlib.contextmanager
def clearly() -> Iterator[None]:
    """Turns a disk's errors, a lack of memory, and what a user's function raises into a `JobFailure`."""
    try:
        yield
    except MemoryError as error:
        raise JobFailure(f"this machine's memory does not do for it ({error or 'MemoryError'}): --engine spark needs "
                         "less in one place; nothing was published") from error
    except OSError as error:
        words = {errno.ENOSPC: f"the disk is full: make room for output and {tempfile.gettempdir()}",
                 errno.EROFS: "a folder cannot be written: the output, or TMPDIR",
                 errno.EACCES: "a folder cannot be written: the output, or TMPDIR"}.get(error.errno or 0)
        what = f"{words} ({error})" if words else str(error)
        raise JobFailure(f"{error.filename}: {what}" if error.filename else f"{what}; nothing was published"
                         ) from error
