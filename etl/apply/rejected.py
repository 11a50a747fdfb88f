"""`Reject`: a rejected row, which is written as one line of JSON. `RejectFinder` finds these rows.

Lines are numbered from 1. Records over several lines, rows of columns and rows after joins have no number."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sluice.common.errors import InputError
from sluice.etl.apply.counts import selected
from sluice.etl.apply.features import Features
from sluice.etl.apply.lines import are_headers, strip_end
from sluice.etl.apply.parse import ADDED_COLUMNS, InputParser, Parsed
from sluice.etl.spec.row_split import fold_keys, split_of
from sluice.etl.spec.spec import Spec

Places = npt.NDArray[np.float64]
_NUMBER = "_number"
"""A column with each row's number in its batch."""
_NAMES = re.compile(r"\.?(part-[^/]*\.json|_SUCCESS)(\.crc)?")


@dataclass(frozen=True, slots=True)
class Reject:
    """One rejected row."""

    file: str | None
    line: int | None
    reason: str
    raw: str
    """The row's text. Bytes that are no text are escaped."""
    base64: str | None
    """The row's bytes, if they are not all text."""

    def to_json(self) -> str:
        """Returns the line of the rejects' files, in Spark's format. It has no fields without a value."""
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value is not None},
            ensure_ascii=False,
            separators=(",", ":"),
        )


def check_rejects_folder(folder: str, names: Iterable[tuple[str, bool]]) -> None:
    """Raises an InputError if a folder has other files than the rejects of an earlier job, because its content will be
    replaced. `names` has each name in the folder, and whether it is a file."""
    other = next((name for name, plain in names if not plain or not _NAMES.fullmatch(name)), None)
    if other is not None:
        raise InputError(
            f"--rejects {folder}: holds {other!r}, which no job wrote and which would be removed; "
            "name another folder"
        )


class RejectFinder:
    """Finds the rejected rows of batches: the rows that do not parse. With `features`, it also finds the rows with a
    feature that cannot be published."""

    def __init__(
        self,
        spec: Spec,
        headers: Collection[bytes] = (),
        features: Features | None = None,
    ) -> None:
        """`headers` are lines that are no rows."""
        self._spec = spec
        self._headers = headers
        self._features = features
        self._parser = InputParser(spec)

    def of(
        self,
        batch: pa.RecordBatch,
        places: Callable[[pa.RecordBatch], Places | None] = lambda _: None,
    ) -> Iterator[tuple[int, str, str, str | None]]:
        """Yields the number in its batch, the reason, the text and the base64 of each rejected row. `places` returns
        the values of the column `input.place` for all rows, if the spec has that column."""
        numbers = np.arange(batch.num_rows)
        if self._headers and "line" in batch.schema.names:
            numbers = np.flatnonzero(~are_headers(batch["line"], self._headers))
        rows = batch.take(pa.array(numbers))
        parsed = self._parser.parse(rows, places(rows))
        rejected = [*parsed.rejected, *self._late(parsed, rows.num_rows)]
        for number, reason, raw, coded in texts_of(rows, rejected):
            yield int(numbers[number]), reason, raw, coded

    def _late(self, parsed: Parsed, count: int) -> Iterable[tuple[int, str]]:
        """Returns the rows that parse but have a feature that cannot be published, with the reasons."""
        if self._features is None or not parsed.rows:
            return ()
        numbers = np.setdiff1d(np.arange(count), [number for number, _ in parsed.rejected])
        columns, keys = selected(
            self._spec, replace(parsed, columns={**parsed.columns, _NUMBER: pa.array(numbers)})
        )
        kept = columns.pop(_NUMBER).to_numpy()
        found: dict[int, str] = {}
        split, folds = split_of(columns, keys, self._spec), fold_keys(columns, keys, self._spec)
        extras = self._features.extras(columns, keys, split, folds)
        flags = self._features.rejected_after_learning(columns, extras)
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
    """Returns a row as text, and its bytes in base64 if they are not text."""
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
