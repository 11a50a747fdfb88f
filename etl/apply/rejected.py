"""Rows that do not parse, as a job sets them aside: `Reject`, one line of JSON each.

Lines are numbered from 1; records over several lines and rows of columns have no number."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sluice.etl.apply.lines import bare
from sluice.etl.apply.parse import Parsed
from sluice.etl.common.errors import InputError

_NAMES = re.compile(r"\.?(part-[^/]*\.json|_SUCCESS)(\.crc)?")


@dataclass(frozen=True, slots=True)
class Reject:
    """One row that does not parse."""

    file: str
    line: int | None
    reason: str
    raw: str
    """The row's text; bytes that are none are escaped."""
    base64: str | None
    """All its bytes, where the text cannot show every one."""

    def to_json(self) -> str:
        """A line of the rejects' files: as Spark writes one, without what is not there."""
        found = {"file": self.file, "line": self.line, "reason": self.reason, "raw": self.raw, "base64": self.base64}
        return json.dumps({name: value for name, value in found.items() if value is not None}, ensure_ascii=False,
                          separators=(",", ":"))


def refuse_others(folder: str, names: Iterable[tuple[str, bool]]) -> None:
    """Refuses a folder that holds anything but the rejects of an earlier job, as its content is going to be replaced;
    `names` are the names in it, and whether each is a file."""
    other = next((name for name, plain in names if not plain or not _NAMES.fullmatch(name)), None)
    if other is not None:
        raise InputError(f"--rejects {folder}: holds {other!r}, which no job set aside and which would be removed; "
                         "name another folder")


def texts_of(batch: pa.RecordBatch, parsed: Parsed, headers: Collection[bytes] = ()
             ) -> Iterator[tuple[int, str, str, str | None]]:
    """Yields the number in its batch, the reason, the text and the base64 of each row that was rejected; lines that
    repeat a header are none."""
    rejected = sorted(parsed.rejected)
    rows = batch.take(pa.array([number for number, _ in rejected], pa.int64())).to_pylist()
    for (number, reason), row in zip(rejected, rows, strict=True):
        if "line" not in row or bare(row["line"]) not in headers:
            yield number, reason, *_text(row)


def _text(row: dict[str, Any]) -> tuple[str, str | None]:
    """A row as text, and its bytes in base64 if they are not text."""
    if "line" in row:
        content = bare(row["line"])
    elif "_broken" in row:
        cells = b",".join(value or b"" for name, value in row.items() if name not in ("_file", "_broken"))
        content = cells if row["_broken"] is None else row["_broken"].encode("latin-1")
    else:
        return json.dumps({name: value for name, value in row.items() if name not in ("_file", "_bad")},
                          default=str), None
    try:
        return content.decode(), None
    except UnicodeDecodeError:
        return content.decode(errors="backslashreplace"), base64.b64encode(content).decode()
