"""Lines for people on standard error: `say`, and `JsonLines`, which makes each of them a JSON object. Standard library
only, because every package uses this file."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from datetime import UTC, datetime
from typing import TextIO

from sluice.common.errors import printable

_MARK = re.compile(
    r"^(?:sluice: )?(?:error: |failed: |Traceback \(|warning: |.+:\d+: \w*Warning: )", re.M
)


def say(text: str) -> None:
    """Prints a line for people (`printable`). If standard error is a file on a full disk, or is closed, the line is
    lost."""
    try:
        if sys.stderr is not None:
            print(printable(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except (OSError, ValueError):
        pass


class JsonLines(io.TextIOBase):
    """A stream that writes one JSON object for each text that ends in a newline. What a thread has written without
    one is kept until then."""

    def __init__(self, out: TextIO, program: str) -> None:
        self._out = out
        self._program = program
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        whole = self._begun.pop(threading.get_ident(), "") + text
        if whole.endswith("\n"):
            self._print(whole)
        elif whole:
            self._begun[threading.get_ident()] = whole
        return len(text)

    def finish(self) -> None:
        """Writes what no newline has ended."""
        for thread in list(self._begun):
            self._print(self._begun.pop(thread, ""))

    def flush(self) -> None:
        self._out.flush()

    def fileno(self) -> int:
        return self._out.fileno()

    def writable(self) -> bool:
        return True

    def _print(self, text: str) -> None:
        if not (message := printable(text.strip("\n"))):
            return
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": level_of(message),
            "program": self._program,
            "message": message,
        }
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()


def level_of(message: str) -> str:
    """Returns error, warning or info, by how the lines of a message begin."""
    found = [mark[0] for mark in _MARK.finditer(message)]
    if not found:
        return "info"
    return "warning" if all("arning: " in mark for mark in found) else "error"
