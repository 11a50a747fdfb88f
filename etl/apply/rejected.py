"""Rows that a job rejects: `Reject`, one line of JSON each, and `Refused`, which finds them.

Lines are numbered from 1; records over several lines, rows of columns and rows that met others have no number."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.counts import selected
from sluice.etl.apply.features import Features
from sluice.etl.apply.lines import are_headers, strip_end
from sluice.etl.apply.parse import ADDED_COLUMNS, InputParser, Parsed
from sluice.etl.spec.row_split import fold_keys, row_keys, split_of
from sluice.etl.spec.spec import Spec

Places = npt.NDArray[np.float64]
_NUMBER = "_number"  # a column that says which row of its batch each row is
_NAMES = re.compile(r"\.?(part-[^/]*\.json|_SUCCESS)(\.crc)?")


@dataclass(frozen=True, slots=True)
class Reject:
    """One row that the table does not get."""

    file: str | None
    line: int | None
    reason: str
    raw: str
    """The row's text; bytes that are none are escaped."""
    base64: str | None
    """All its bytes, where the text cannot show every one."""

    def to_json(self) -> str:
        """A line of the rejects' files: as Spark writes one, without what is not there."""
        found = {
            "file": self.file,
            "line": self.line,
            "reason": self.reason,
            "raw": self.raw,
            "base64": self.base64,
        }
        return json.dumps(
            {name: value for name, value in found.items() if value is not None},
            ensure_ascii=False,
            separators=(",", ":"),
        )


def refuse_others(folder: str, names: Iterable[tuple[str, bool]]) -> None:
    """Refuses a folder that holds anything but the rejects of an earlier job, as its content is going to be replaced;
    `names` are the names in it, and whether each is a file."""
    other = next((name for name, plain in names if not plain or not _NAMES.fullmatch(name)), None)
    if other is not None:
        raise InputError(
            f"--rejects {folder}: holds {other!r}, which no job wrote and which would be removed; "
            "name another folder"
        )


class Refused:
    """Finds the rows of one batch after another that the table does not get: those that do not parse, and, if
    `features` are given, those of which a feature cannot be published once operators have learned."""

    def __init__(
        self,
        spec: Spec,
        headers: Collection[bytes] = (),
        features: Features | None = None,
        but: Collection[str] = (),
    ) -> None:
        """Lines that repeat a header are no rows. Columns that `but` names are not looked at."""
        self._spec = spec
        self._headers = headers
        self._features = features
        self._but = but
        self._parser = InputParser(spec)

    def of(
        self,
        batch: pa.RecordBatch,
        places: Callable[[pa.RecordBatch], Places | None] = lambda _: None,
    ) -> Iterator[tuple[int, str, str, str | None]]:
        """Yields the number in its batch, the reason, the text and the base64 of each such row. `places` gives those
        of all rows in the input, if the spec has a column of them."""
        numbers = np.arange(batch.num_rows)
        if self._headers and "line" in batch.schema.names:
            numbers = np.flatnonzero(~are_headers(batch["line"], self._headers))
        rows = batch.take(pa.array(numbers))
        parsed = self._parser.parse(rows, places(rows))
        rejected = [*parsed.rejected, *self._late(parsed, rows.num_rows)]
        for number, reason, raw, coded in texts_of(rows, rejected):
            yield int(numbers[number]), reason, raw, coded

    def _late(self, parsed: Parsed, count: int) -> Iterable[tuple[int, str]]:
        """The rows that parse, and whose features cannot be published."""
        if self._features is None or not parsed.rows:
            return ()
        numbers = np.setdiff1d(np.arange(count), [number for number, _ in parsed.rejected])
        columns, keys = selected(
            self._spec, replace(parsed, columns={**parsed.columns, _NUMBER: pa.array(numbers)})
        )
        kept = columns.pop(_NUMBER).to_numpy()
        keys = row_keys(columns, self._spec) if keys is None else keys
        found: dict[int, str] = {}
        split, folds = split_of(columns, keys, self._spec), fold_keys(columns, keys, self._spec)
        flags = self._features.late_unfit(columns, keys, split, folds, but=self._but)
        for reason, bad in flags.items():
            for number in kept[bad].tolist():
                found.setdefault(number, reason)
        return found.items()


def texts_of(
    batch: pa.RecordBatch, rejected: Iterable[tuple[int, str]]
) -> Iterator[tuple[int, str, str, str | None]]:
    """Yields the number in its batch, the reason, the text and the base64 of each row that was rejected."""
    ordered = sorted(rejected)
    rows = batch.take(pa.array([number for number, _ in ordered], pa.int64())).to_pylist()
    for (number, reason), row in zip(ordered, rows, strict=True):
        yield number, reason, *_text(row)


def _text(row: dict[str, Any]) -> tuple[str, str | None]:
    """A row as text, and its bytes in base64 if they are not text."""
    row = {name: value for name, value in row.items() if name not in ADDED_COLUMNS}
    if "line" in row:
        content = strip_end(row["line"])
    elif "_broken" in row:
        cells = b",".join(value or b"" for name, value in row.items() if name != "_broken")
        content = cells if row["_broken"] is None else row["_broken"].encode("latin-1")
    else:
        return json.dumps(row, default=str), None
    try:
        return content.decode(), None
    except UnicodeDecodeError:
        return content.decode(errors="backslashreplace"), base64.b64encode(content).decode()
