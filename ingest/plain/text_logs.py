"""Samples logs in lines of text for `sluice guess`: `TextSample` has some rows, their likely types, and how a spec
reads them. If a few values do not fit, their rows are left out, because a job rejects them."""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import UsageError
from sluice.etl.spec.input_values import THOUSANDS, grouped_digits
from sluice.etl.spec.nested_columns import flattened, join_chunks
from sluice.ingest.plain.guess import share_of_values, times_of, usual_label

_NAMES = re.compile(r"\.(csv|tsv|txt|log|json|jsonl|ndjson)(\.(gz|bz2))?$", re.IGNORECASE)
_BYTES, _PACKED = 1 << 20, 1 << 26
"""Bytes to read at the beginning of the first file and at the end of the last. And bytes to decompress of a compressed
file at most, to find its end."""
_WHOLE, _POINT, _COMMA = (
    re.compile(rf"[ \t]*({form})[ \t]*")
    for form in (
        r"-?(0|[1-9][0-9]{0,17}|[1-8][0-9]{18})",
        r"[+-]?[0-9]{1,19}(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?|[nN]a[nN]|NAN",
        r"-?[0-9]{1,19}(,[0-9]+)?|[nN]a[nN]|NAN",
    )
)
_READINGS = {
    (decimal, thousands): re.compile(
        rf"[ \t]*[+-]?([0-9]{{1,18}}|{grouped_digits(thousands)})"
        rf"({re.escape(decimal)}[0-9]+)?[ \t]*"
    )
    for decimal in ".,"
    for thousands in ("", *THOUSANDS)
    if thousands != decimal
}
"""Decimal mark and mark of thousands → the numbers that are written so."""
_MISSING = ("N/A", "n/a", "NA", "#N/A", "NULL", "null", "None", "-", "--", "?", "\\N")
_DELIMITERS, _ALIKE = "\t;,|", 0.99
_PADDED = re.compile(r"0[0-9]+")
"""A whole number that needs its leading zeros, such as a postcode."""
_DISTINCT = 50
"""Fewer than one in so many distinct values of a column of numbers may be no number."""


@dataclass(frozen=True, slots=True)
class TextSample:
    """Some rows of text, and how a spec reads them."""

    form: str
    """The format's name in a spec."""
    table: pa.Table
    rows: int
    """The estimated number of all rows."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """The keys of `[input]`, except format and columns."""
    times: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The columns of times, with their formats."""
    swapped: Mapping[str, str] = field(default_factory=dict)
    """The columns of times whose days and months could be exchanged, with the other format."""
    others: Mapping[str, str] = field(default_factory=dict)
    """The columns that a spec cannot read, with the reason."""
    ambiguous: Sequence[str] = ()
    """The columns whose only marks may be for decimals or for thousands."""
    is_complete: bool = True
    """Whether the end of the last file was read."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """The columns with a few values that do not fit the type: how many there are, and an example."""
    label: str | None = None
    """The label, if its name is given or usual. If lines have no header, it is the first column, or else the last, that
    only holds 0 and 1."""

    @classmethod
    def of(cls, paths: Sequence[str], label: str | None = None) -> TextSample:
        """Samples these files, which are sorted by name. `label` is the label's name if it is known."""
        first, last, is_complete = _read_ends(paths[0])
        if len(paths) > 1:
            *others, is_complete = _read_ends(paths[-1])
            last = others[1] or others[0]
        content = first + last
        if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UsageError(
                f"{paths[0]}: the file is UTF-16, in which line ends have other bytes; write it in UTF-8"
            )
        encoding = next(
            (name for name in ("utf-8", "cp1252") if _decodes(content, name)), "latin-1"
        )
        ends = first.count(b"\n")
        placed = {
            f"{paths[0]}, line {n}"
            if n <= ends
            else f"{paths[-1]}, line {n - ends} of its last million bytes": line.removeprefix(
                "\ufeff"
            )
            for n, line in enumerate(content.decode(encoding).split("\n"), 1)
            if line.strip()
        }
        if not placed:
            raise UsageError(f"{paths[0]}: the file has no lines")
        keys = {} if encoding == "utf-8" else {"encoding": encoding}
        rows = round(len(placed) * max(1.0, sum(map(os.path.getsize, paths)) / len(content)))
        more: dict[str, Any] = {
            "label": label,
            "keys": keys,
            "rows": rows,
            "is_complete": is_complete,
        }
        if next(iter(placed.values())).lstrip()[0] in "[{":
            return cls.of_objects(placed, **more)
        return cls.of_fields(placed, **more)

    @classmethod
    def of_objects(cls, placed: Mapping[str, str], *, label: str | None, **more: Any) -> TextSample:
        """Samples lines with one JSON object each. A job rejects other lines. `placed` has each line by its place."""
        objects = {
            place: found for place, line in placed.items() if isinstance(found := _json(line), dict)
        }
        if len(objects) < _ALIKE * len(placed):
            raise UsageError(
                f"{next(iter(placed))}: the file begins like JSON, but {len(placed) - len(objects):,} of "
                f"{len(placed):,} lines are no object; write one object on each line (`jq -c '.[]'` does "
                "that for a list)"
            )
        columns: dict[str, pa.Array] = {}
        others: dict[str, str] = {}
        cells: dict[str, list[Any]] = {}
        names = dict.fromkeys(name for one in objects.values() for name in one)
        label = label or usual_label(names)
        for name in names:
            cells[name] = [one.get(name) for one in objects.values()]
            fitting = _without_few(cells[name], lambda one: not isinstance(one, str), name == label)
            try:
                found = flattened(pa.table({name: pa.array(fitting)}))
            except (pa.ArrowException, OverflowError):
                others[name] = "values of several types, or beyond 64 bits"
                continue
            except UnicodeEncodeError:
                others[name] = "texts that are not Unicode (half of a surrogate pair)"
                continue
            for part, values in zip(
                found.column_names, map(join_chunks, found.columns), strict=True
            ):
                if pa.types.is_struct(values.type):
                    others[part] = "objects without members"
                elif pa.types.is_list(values.type) and not (
                    pa.types.is_string(values.type.value_type)
                    or pa.types.is_integer(values.type.value_type)
                ):
                    others[part] = f"{values.type}, which a job cannot turn into ids"
                else:
                    columns[part] = values
        return cls(
            form="json", others=others, label=label, **_typed(columns, cells, [*objects]), **more
        )

    @classmethod
    def of_fields(
        cls,
        placed: Mapping[str, str],
        *,
        label: str | None,
        keys: dict[str, Any],
        **more: Any,
    ) -> TextSample:
        """Samples lines of fields with a delimiter between them. `placed` has each line by its place."""
        sign, rows = _cut(placed)
        first = next(iter(rows.values()))
        header = _is_header(first)
        names = first if header else [f"column_{number + 1}" for number in range(len(first))]
        rows = {place: row for place, row in rows.items() if not header or row != names}
        cells = list(zip(*rows.values(), strict=True))
        if not cells:
            raise UsageError(f"{next(iter(placed))}: the file has only a header")
        texts = {
            name: [cell.strip("\r") or None for cell in column]
            for name, column in zip(names, cells, strict=True)
        }
        clicks = (
            name for name in (names[0], names[-1]) if not header and set(texts[name]) == {"0", "1"}
        )
        label = label or next(clicks, usual_label(names))
        numbers, null_values = _without_missing(texts)
        (decimal, thousands), ambiguous = _marks(numbers)
        if thousands:
            numbers = {
                name: _without_marks(cells, decimal, thousands) for name, cells in numbers.items()
            }
        fitting, comma = _fit_marks(numbers, label, ambiguous)
        comma = decimal == "," if thousands else comma
        keys = {
            **({} if sign == "\t" else {"delimiter": sign}),
            **({"header": True} if header else {}),
            **keys,
            **({"decimal": ","} if comma else {}),
            **({"thousands": thousands} if thousands else {}),
            **({"null_values": null_values} if null_values else {}),
        }
        columns = {
            name: _numbers(column, comma)
            for name, column in fitting[_COMMA if comma else _POINT].items()
        }
        return cls(
            form="tsv" if sign == "\t" else "csv",
            keys=keys,
            label=label,
            ambiguous=() if comma or thousands else ambiguous,
            **_typed(columns, numbers, [*rows]),
            **more,
        )


def text_paths(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Returns the text files that `source` stands for. Empty if they are Parquet or do not exist."""
    found: list[str] = []
    for one in [source] if isinstance(source, (str, os.PathLike)) else source:
        text = os.fspath(one)
        if os.path.isdir(text):
            there = [
                path
                for path in sorted(Path(text).rglob("*"))
                if path.is_file()
                and not any(part.startswith(("_", ".")) for part in path.relative_to(text).parts)
            ]
            found += (
                [str(path) for path in there if _NAMES.search(path.name)]
                if not any(path.suffix == ".parquet" for path in there)
                else []
            )
        else:
            found += [text] if os.path.isfile(text) else sorted(glob.glob(text, recursive=True))
    found = [path for path in found if os.path.isfile(path) and os.path.getsize(path)]
    for path in found:
        with open(path, "rb") as file:
            if path.endswith(".parquet") or file.read(4) == b"PAR1":
                return []
    return found


def _read_ends(path: str) -> tuple[bytes, bytes, bool]:
    """Returns the first lines of a file, its last lines, and whether its end was read. A small file only has first
    lines. A compressed file must be read up to its end."""
    size, packed = os.path.getsize(path), path.endswith((".gz", ".bz2"))
    content = _read(path, _PACKED if packed else _BYTES)
    is_complete = not packed or len(content) < _PACKED
    if len(content) < _BYTES:
        return content if content.endswith(b"\n") else content + b"\n", b"", True
    last = content[-_BYTES:] if packed else _read(path, _BYTES, max(_BYTES, size - _BYTES))
    last = last if is_complete else last[: last.rfind(b"\n") + 1]
    return content[: content.rfind(b"\n", 0, _BYTES) + 1], last[last.find(b"\n") + 1 :], is_complete


def _read(path: str, most: int, start: int = 0) -> bytes:
    try:
        with (
            pa.input_stream(path, compression="detect") if not start else pa.OSFile(path) as stream
        ):
            if start:
                stream.seek(start)
            return bytes(stream.read(most))
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{path}: cannot be read ({error}); the file is damaged") from None


def _decodes(content: bytes, encoding: str) -> bool:
    try:
        content.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _cut(placed: Mapping[str, str]) -> tuple[str, dict[str, list[str]]]:
    """Returns the delimiter, and the fields of each line that has as many of them as most."""
    cut = {sign: _split_fields(placed.values(), sign) for sign in _DELIMITERS}
    widths = {sign: Counter(map(len, rows)).most_common(1)[0] for sign, rows in cut.items()}
    fitting = [
        sign
        for sign, (width, count) in widths.items()
        if width > 1 and count >= _ALIKE * len(placed)
    ]
    if not fitting:
        raise UsageError(
            f"{next(iter(placed))}: the file is neither Parquet, nor one JSON object a line, nor lines with equally "
            "many fields separated by tab ; , or |"
        )
    sign = max(fitting, key=lambda one: widths[one][0])
    return sign, {
        place: row
        for place, row in zip(placed, cut[sign], strict=False)
        if len(row) == widths[sign][0]
    }


def _split_fields(lines: Iterable[str], sign: str) -> list[list[str]]:
    """Returns the fields of each line. A single empty field if the lines cannot be parsed."""
    try:
        return list(
            csv.reader(
                lines, delimiter=sign, quoting=csv.QUOTE_NONE if sign == "\t" else csv.QUOTE_MINIMAL
            )
        )
    except csv.Error:
        return [[""]]


def _is_header(row: Sequence[str]) -> bool:
    """Whether these are column names: none empty, all different, none a number."""
    return len(set(row)) == len(row) and not any(
        not cell or _POINT.fullmatch(cell) or _COMMA.fullmatch(cell) for cell in row
    )


def _all(form: re.Pattern[str], cells: Sequence[str | None]) -> bool:
    return any(cells) and all(cell is None or form.fullmatch(cell) for cell in cells)


def _fit_marks(
    numbers: Mapping[str, Sequence[str | None]], label: str | None, ambiguous: Sequence[str]
) -> tuple[dict[re.Pattern[str], dict[str, Sequence[str | None]]], bool]:
    """Returns the columns without a few cells that do not fit, by decimal mark, and whether that mark is a comma."""
    fitting = {
        form: {
            name: column
            if _is_padded(column)
            else _without_few(column, form.fullmatch, name == label)
            for name, column in numbers.items()
        }
        for form in (_COMMA, _POINT)
    }
    comma, point = (
        any(
            _all(form, column) and not _all(_WHOLE, column)
            for name, column in columns.items()
            if name not in ambiguous
        )
        for form, columns in fitting.items()
    )
    return fitting, comma and not point


def _without_missing(
    columns: Mapping[str, Sequence[str | None]],
) -> tuple[dict[str, Sequence[str | None]], list[str]]:
    """Returns columns of numbers without their texts for missing values, and these texts."""
    found, words = dict(columns), set[str]()
    for name, cells in columns.items():
        rest = [None if cell in _MISSING else cell for cell in cells]
        if any(_all(form, rest) for form in (_POINT, *_READINGS.values())):
            found[name] = rest
            words |= {*_MISSING}.intersection(cells)
    return found, sorted(words)


def _marks(columns: Mapping[str, Sequence[str | None]]) -> tuple[tuple[str, str], list[str]]:
    """Returns the decimal mark and the mark of thousands, and the columns that may be read in two ways. Such a column
    decides nothing."""
    fits = {
        name: {marks for marks, form in _READINGS.items() if _all(form, cells)}
        for name, cells in columns.items()
        if not _is_padded(cells) and not _all(_WHOLE, cells)
    }
    ambiguous = [
        name
        for name, marks in fits.items()
        if {(".", ""), (",", ".")} <= marks or {(",", ""), (".", ",")} <= marks
    ]
    decimals = {name: {decimal for decimal, _ in marks} for name, marks in fits.items()}
    sure = set().union(*(one for name, one in decimals.items() if len(one) == 1))
    decimal = "," if sure == {","} else "."
    found = set[str]()
    for name, marks in fits.items():
        left = {thousands for one, thousands in marks if one == decimal}
        if len(left) == 1 and (sure or name not in ambiguous):
            found |= left
    thousands = found.pop() if len(found) == 1 else ""
    return (decimal, thousands), [] if sure else ambiguous


def _without_marks(
    cells: Sequence[str | None], decimal: str, thousands: str
) -> Sequence[str | None]:
    """Returns a column of numbers without their marks of thousands."""
    if not _all(_READINGS[decimal, thousands], cells):
        return cells
    return [cell and cell.replace(thousands, "") for cell in cells]


def _is_padded(cells: Sequence[str | None]) -> bool:
    """Whether cells have leading zeros. A few of them may also occur among numbers."""
    given = [cell for cell in cells if cell]
    return sum(map(bool, map(_PADDED.fullmatch, given))) > (1 - _ALIKE) * len(given)


def _numbers(cells: Sequence[str | None], comma: bool) -> pa.Array:
    """Returns the cells as numbers if all of them are numbers, otherwise as texts."""
    if _is_padded(cells):
        return pa.array(cells, pa.string())
    if _all(_WHOLE, cells):
        return pa.array([None if cell is None else int(cell) for cell in cells], pa.int64())
    if _all(_COMMA if comma else _POINT, cells):
        return pa.array(
            [None if cell is None else float(cell.replace(",", ".")) for cell in cells],
            pa.float64(),
        )
    return pa.array(cells, pa.string())


def _without_few(
    cells: Sequence[Any], fits: Callable[[Any], object], is_label: bool
) -> Sequence[Any]:
    """Returns the cells with None in place of those that do not fit. If these are too many, returns all cells.

    In a label, only 0 and 1 fit if 1 is at least ten times as frequent as other values. With a 2 it may be a count."""
    if is_label and 2 not in cells and "2" not in cells:
        fits = (0, 1, "0", "1").__contains__
    given = [cell for cell in cells if cell is not None]
    wrong = [cell for cell in given if not fits(cell)]
    if len(wrong) > (1 - _ALIKE) * len(given) or (
        10 * len(wrong) > given.count(1) + given.count("1")
        if is_label
        else _DISTINCT * len(set(wrong)) >= len(set(map(str, given)))
    ):
        return cells
    return [None if cell is None or not fits(cell) else cell for cell in cells]


def _typed(
    columns: Mapping[str, pa.Array], cells: Mapping[str, Sequence[Any]], places: Sequence[str]
) -> dict[str, Any]:
    """Converts columns of texts that hold times. Returns all columns, the formats of the times, and what is known of
    cells that do not fit their column. Rows with such cells are left out."""
    found, times = dict(columns), dict[str, tuple[str, ...]]()
    swapped = dict[str, str]()
    rejected, fits = dict[str, str](), np.ones(len(places), bool)
    for name, values in columns.items():
        is_text = pa.types.is_string(values.type)
        if is_text and (read := times_of(values, pc.unique(values.drop_null()))):
            times[name] = read.formats
            if read.swapped:
                swapped[name] = read.swapped
            microseconds = pc.multiply(read.seconds, 1e6).cast(pa.int64(), safe=False)
            at = microseconds.cast(pa.timestamp("us"))
            has_clock = any("%H" in one for one in read.formats)
            found[name] = at if has_clock else at.cast(pa.date32(), safe=False)
        wrong = [
            row
            for row, cell in enumerate(cells.get(name, ()))
            if cell not in (None, "") and not found[name][row].is_valid
        ]
        if wrong:
            fits[wrong] = False
            wrong_values = share_of_values(len(wrong), len(places), str(cells[name][wrong[0]]))
            rejected[name] = f"{wrong_values} ({places[wrong[0]]})"
    table = pa.table(found).filter(pa.array(fits))
    return {"table": table, "times": times, "swapped": swapped, "rejected": rejected}
