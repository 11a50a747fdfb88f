"""`Rejects` collects the rejected rows of a job, and writes them. `PartParser` parses rows, and describes the rejected.

Lines are numbered from 1. Rows of columns and rows after joins have no number."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from sluice.common.errors import InputError
from sluice.common.stores import Place
from sluice.etl.apply.input_checks import Before, Part, headers_of
from sluice.etl.apply.lines import are_headers, strip_end
from sluice.etl.apply.number_limits import is_late
from sluice.etl.apply.parse import ADDED_COLUMNS, Batches, InputParser, Parsed
from sluice.etl.apply.row_store import RowStore
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.spec import Spec

NOWHERE: Part = ("", 0)
"""The part of rows without a file, such as those after joins."""
PLACE = ("_file", "_from", "_line")
"""Where a row comes from: these columns are stored with rows that may be rejected after operators have learned."""
REJECTS = pa.schema(
    [
        ("file", pa.string()),
        ("part", pa.int64()),
        ("line", pa.int64()),
        ("reason", pa.string()),
        ("raw", pa.string()),
        ("base64", pa.string()),
    ]
)
"""A rejected row, with the number of its line in its part. Without a reason, `line` is the number of its lines."""
_NAMES = re.compile(r"\.?(part-[^/]*\.json|_SUCCESS)(\.crc)?")


class Rejects:
    """Stores rejected rows in memory up to a budget, then on the disk."""

    def __init__(self, budget: int) -> None:
        self._store = RowStore(budget)
        self._lines = dict[Part, int]()
        self.examples = dict[str, dict[str, Any]]()
        """A row for each reason, after `write`."""

    def add(self, rows: pa.RecordBatch) -> None:
        """Adds rows of one part, or the number of its lines, as `REJECTS`."""
        if rows.num_rows:
            part = (rows["file"][0].as_py(), rows["part"][0].as_py())
            if rows["reason"][0].is_valid:
                self._store.put([(part, rows)])
            else:
                self._lines[part] = rows["line"][0].as_py()

    def write(self, folder: str) -> dict[str, int]:
        """Writes all rows as JSON lines of a folder, which is emptied first, by file and line. Counts them by
        reason."""
        check_rejects_folder(folder)
        fs, inner = _open(folder)
        fs.create_dir(inner, recursive=True)
        fs.delete_dir_contents(inner)
        counts = Counter[str]()
        with fs.open_output_stream(f"{inner}/part-00000.json") as sink:
            for row in self._rows():
                self.examples.setdefault(row["reason"], row)
                counts[row["reason"]] += 1
                text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
                sink.write(f"{text}\n".encode())
        return dict(sorted(counts.items()))

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yields the file, line, reason, text and base64 of each row, as far as it has them."""
        before = Counter[str]()
        for part in sorted(self._lines.keys() | self._store.rows.keys()):
            stored = (row for batch in self._store.get(part) for row in batch.to_pylist())
            for row in sorted(stored, key=itemgetter("line")) if part in self._lines else stored:
                if row["line"] is not None:
                    row["line"] = before[part[0]] + row["line"] + 1
                row |= {"file": row["file"] or None, "part": None}
                yield {name: value for name, value in row.items() if value is not None}
            before[part[0]] += self._lines.get(part, 0)

    def close(self) -> None:
        self._store.close()


class PartParser:
    """Parses the rows of an input's parts, one batch after another."""

    def __init__(self, spec: Spec, before: Before | None) -> None:
        """`before` has the rows before each part, if the spec has `input.place`. Good rows that may
        be rejected later get the columns `PLACE`."""
        self._parser = InputParser(spec, compiled=True)
        self._headers = encoded_headers(spec.input)
        self._before = before
        # Rows may be rejected after operators have learned.
        self._keeps_places = not spec.rows.relational and any(map(is_late, spec.columns))
        self._rows, self._lines = Counter[Part](), Counter[Part]()
        self._has_lines = False

    def parse(self, part: Part, batch: pa.RecordBatch) -> tuple[Parsed, pa.RecordBatch]:
        """Parses the next rows of a part. Headers are left out. Returns with them the rejected rows as `REJECTS`."""
        numbers, rows = np.arange(batch.num_rows), batch
        self._has_lines = "line" in batch.schema.names
        if self._has_lines and (dropped := are_headers(batch["line"], self._headers)).any():
            numbers, rows = np.flatnonzero(~dropped), batch.filter(pa.array(~dropped))
        places = None
        if self._before is not None:
            start = self._before[0][part] + self._rows[part]
            places = np.arange(start, start + len(numbers)) / self._before[1]
        parsed = self._parser.parse(rows, places)
        first = self._lines[part]
        self._rows[part] += len(numbers)
        self._lines[part] += batch.num_rows
        if self._keeps_places:
            lines = first + np.delete(numbers, [number for number, _ in parsed.rejected])
            file = pa.DictionaryArray.from_arrays(
                pa.array(np.zeros(len(lines), np.int32)), pa.array([part[0]])
            )
            place = (file, pa.array(np.full(len(lines), part[1])), pa.array(lines))
            parsed.columns.update(zip(PLACE, place, strict=True))
        rejected = [(int(numbers[number]), reason) for number, reason in parsed.rejected]
        return parsed, describe(part, first if self._has_lines else None, batch, rejected)

    def lines(self) -> Batches:
        """Yields the number of lines of each part, as `REJECTS`."""
        for part, lines in self._lines.items() if self._has_lines else ():
            yield _batch([(*part, lines, None, None, None)])


def encoded_headers(source: Input) -> tuple[bytes, ...]:
    return tuple(header.encode(source.encoding) for header in headers_of(source))


def count_rows(batch: pa.RecordBatch, headers: tuple[bytes, ...]) -> int:
    """Returns the number of rows before parsing, without headers."""
    if "line" not in batch.schema.names:
        return int(batch.num_rows)
    return int(np.count_nonzero(~are_headers(batch["line"], headers)))


def describe(
    part: Part, first: int | None, batch: pa.RecordBatch, rejected: Iterable[tuple[int, str]]
) -> pa.RecordBatch:
    """Returns rejected rows of a batch as `REJECTS`. The batch begins at the line `first` of its part, if it has
    lines."""
    ordered = sorted(rejected)
    rows = batch.take(pa.array([number for number, _ in ordered], pa.int64())).to_pylist()
    return _batch(
        (*part, None if first is None else first + number, reason, *_text(row))
        for (number, reason), row in zip(ordered, rows, strict=True)
    )


def read_again(part: Part, batches: Batches, late: Mapping[int, str]) -> Batches:
    """Yields the rows of a part that were rejected `late`, as `REJECTS`, given their lines and reasons."""
    first = 0
    for batch in batches:
        lines = range(first, first + batch.num_rows)
        rejected = [(line - first, reason) for line, reason in late.items() if line in lines]
        yield describe(part, first if "line" in batch.schema.names else None, batch, rejected)
        first = lines.stop


def check_rejects_folder(folder: str) -> None:
    """Raises an InputError if a folder has other files than the rejects of an earlier job, because its content will be
    replaced."""
    fs, inner = _open(folder)
    this = fs.get_file_info(inner)
    there = (
        [this] if this.is_file else fs.get_file_info(pafs.FileSelector(inner, allow_not_found=True))
    )
    for info in there:
        if not info.is_file or not _NAMES.fullmatch(info.base_name):
            raise InputError(
                f"--rejects {folder}: holds {info.base_name!r}, which no job wrote and which would be removed; "
                "name another folder"
            )


def _open(folder: str) -> tuple[pafs.FileSystem, str]:
    return Place.of(re.sub("^file:(?!//)", "", folder), decode=False).files()


def _batch(rows: Iterable[tuple[Any, ...]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_struct_array(pa.array(list(rows), pa.struct(list(REJECTS))))


def _text(row: dict[str, Any]) -> tuple[str, str | None]:
    """Returns a row as text, and its bytes in base64 if they are not text."""
    if "line" not in row:
        known = {name: value for name, value in row.items() if name not in ADDED_COLUMNS}
        return json.dumps(known, default=str), None
    content = strip_end(row["line"])
    try:
        return content.decode(), None
    except UnicodeDecodeError:
        return content.decode(errors="backslashreplace"), base64.b64encode(content).decode()
