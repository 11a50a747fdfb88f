"""What happens to rows that cannot be processed: `ErrorPolicy` decides (pure), `Quarantine` keeps the books.

`raise` stops at the first error. `quarantine` sets the row aside: it keeps its place in the batch with weight 0, so
shapes, steps and ranks stay as they were; its file, row and reason go into a JSON-lines file. Errors of the program,
as opposed to the data, always stop the run.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from ingest.knobs import nearest

Result = TypeVar("Result")

ON_ERROR = ("raise", "quarantine")
# No row is to blame for these: the next row would fail as well.
PROGRAM_ERRORS = frozenset({"NameError", "ImportError", "SyntaxError", "AttributeError", "NotImplementedError",
                            "MemoryError", "SystemExit", "KeyboardInterrupt", "GeneratorExit",
                            "SystemError"})
_REASON = 500  # characters of an error's text that are kept for each row


class QuarantineError(RuntimeError):
    """The run stops: the policy says so. The message names file, row group, rows, the reason and the option."""


def kinds_of(error: BaseException) -> tuple[str, ...]:
    """Names of an error's class and those above it; a worker process sends the same for its errors."""
    told = getattr(error, "kinds", None)
    return tuple(told) if told else tuple(kind.__name__ for kind in type(error).__mro__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPolicy:
    """How much may be set aside."""

    on_error: str = "raise"
    max_rows: int = 10_000
    """The most rows of a run that may be set aside."""
    max_rate: float = 0.01
    """The most of all rows seen, judged once `probation_rows` were seen: one bad row among the first ten is no rate."""
    probation_rows: int = 100_000

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ValueError(f"on_error: {self.on_error!r}{nearest(self.on_error, ON_ERROR)}")
        if self.max_rows < 0 or self.probation_rows < 0:
            raise ValueError(f"max_rows={self.max_rows}, probation_rows={self.probation_rows}: neither may be below 0")
        if not 0 <= self.max_rate <= 1:
            raise ValueError(f"max_rate: {self.max_rate} is not a share from 0 to 1")

    def objection(self, *, seen: int, aside: int, kinds: Iterable[str] = ()) -> str | None:
        """Why the run must stop, with `aside` of `seen` rows set aside (those in question included); None: go on."""
        program = PROGRAM_ERRORS.intersection(kinds)
        if program:
            return f"{min(program)} is an error of the program, not of a row: on_error does not apply"
        if self.on_error == "raise":
            return "on_error=raise; on_error=quarantine would set such rows aside"
        if aside > self.max_rows:
            return f"{aside} rows set aside are more than max_rows={self.max_rows}"
        if seen >= self.probation_rows and aside > self.max_rate * seen:
            return f"{aside} of {seen} rows set aside are more than max_rate={self.max_rate:g}"
        return None


class Quarantine:
    """The books of one rank. Stages share it."""

    def __init__(self, policy: ErrorPolicy, path: str | os.PathLike[str]):
        """`path` of the JSON-lines file; it is made with the first row."""
        self.policy, self._path = policy, os.fspath(path)
        self._lock = threading.Lock()
        self._seen = self._aside = 0
        self._reasons: Counter[str] = Counter()
        self._descriptor = -1

    def saw(self, rows: int) -> None:
        """Rows that went through. The rate is judged here as well: it may be passed when the probation ends."""
        with self._lock:
            self._seen += rows
            objection = self.policy.objection(seen=self._seen, aside=self._aside) if self._aside else None
        if objection:
            raise QuarantineError(f"{objection}; they are listed in {self._path}")

    def admit(self, error: BaseException, *, stage: str, file: str, row_group: int, rows: Iterable[int]) -> None:
        """Sets `rows` (numbers within their row group) aside, or raises QuarantineError from `error`."""
        rows = list(rows)
        kind, text = getattr(error, "type", type(error).__name__), str(getattr(error, "text", error))
        with self._lock:
            objection = self.policy.objection(seen=self._seen + len(rows), aside=self._aside + len(rows),
                                              kinds=kinds_of(error))
            if objection is None:
                self._aside += len(rows)
                self._seen += len(rows)
                self._reasons[f"{stage}: {kind}"] += len(rows)
                self._write([{"stage": stage, "file": file, "row_group": row_group, "row": row, "type": kind,
                              "reason": text[:_REASON]} for row in rows])
                return
        raise QuarantineError(f"{file} row group {row_group} {_named(rows)}: {stage} failed: {kind}: {text[:_REASON]} "
                              f"({objection})") from error

    def summary(self) -> dict[str, Any]:
        """For the run's last line and its report."""
        with self._lock:
            return {"rows_set_aside": self._aside, "reasons": dict(self._reasons.most_common()),
                    "file": self._path if self._aside else None}

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Written through at once: what was set aside is known even if the run is killed. A list that cannot be written
        stops the run, as no row may be missing unlisted."""
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            while data:
                data = data[os.write(self._descriptor, data):]
        except OSError as error:
            raise QuarantineError(f"{self._path}: {len(lines)} rows that are set aside cannot be listed there "
                                  f"({error.strerror}); make room, or choose another file") from None


def _named(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:5])) + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
    return f"row {shown}" if len(rows) == 1 else f"rows {shown}"


def isolate(attempt: Callable[[int, int], Result], rows: int,
            most: int) -> tuple[list[tuple[int, int, Result]], list[tuple[int, Exception]]]:
    """Finds the rows that make `attempt(start, stop)` raise, by halving what fails.

    Returns what the good ranges gave, in order, and each bad row with its error. An error of the program is raised at
    once, and so is the error of one bad row more than `most`."""
    good: list[tuple[int, int, Result]] = []
    bad: list[tuple[int, Exception]] = []
    ranges = [(0, rows)]
    while ranges:
        start, stop = ranges.pop()
        try:
            good.append((start, stop, attempt(start, stop)))
        except Exception as error:
            if PROGRAM_ERRORS.intersection(kinds_of(error)) or (stop - start <= 1 and len(bad) >= most):
                raise
            if stop - start <= 1:
                bad.append((start, error))
            else:
                middle = (start + stop) // 2
                ranges += [(middle, stop), (start, middle)]
    return good, bad
