"""Samples logs in lines of text for `sluice guess`: `TextSample` has some rows, their likely types, and how a spec
reads them. If a few values do not fit, their rows are left out, because a job rejects them."""

from __future__ import annotations

import contextlib
import csv
import glob
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
_SPACED = r"[ \t]*(?:{})[ \t]*"
_NAN = "[nN]a[nN]|NAN"
_WHOLE = re.compile(_SPACED.format("-?(?:0|[1-9][0-9]{0,17}|[1-8][0-9]{18})"))
_UNMARKED = re.compile(_SPACED.format(f"[+-]?[0-9]{{1,19}}|{_NAN}"))
_NUMBERS = {
    (decimal, thousands): re.compile(
        _SPACED.format(
            rf"[+-]?(?:{grouped}[0-9]{{1,19}})(?:{re.escape(decimal)}[0-9]*)?{exponent}|{_NAN}"
        )
    )
    for decimal, exponent in ((".", "(?:[eE][+-]?[0-9]{1,3})?"), (",", ""))
    for thousands, grouped in (("", ""), *((one, f"{grouped_digits(one)}|") for one in THOUSANDS))
    if thousands != decimal
}
"""Decimal mark and mark of thousands → the numbers that are written so."""
_MISSING = frozenset(("N/A", "n/a", "NA", "#N/A", "NULL", "null", "None", "-", "--", "?", "\\N"))
_DELIMITERS, _ALIKE = "\t;,|", 0.99
_PADDED = re.compile(r"0[0-9]+")
"""A whole number that needs its leading zeros, such as a postcode."""
_DISTINCT = 50
"""Fewer than one in so many distinct values of a column of numbers may be no number."""
Cells = Sequence[Any]
"""A column's cells, None where one is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample:
    """Some rows of text, and how a spec reads them."""

    form: str
    """The format's name in a spec."""
    table: pa.Table
    rows: int
    """The estimated number of all rows."""
    keys: Mapping[str, Any]
    """The keys of `[input]`, except format and columns."""
    notes: Mapping[str, Mapping[str, Any]]
    """What the texts of a column show, as fields of its proposal: the formats of times, and values that do not fit."""
    others: Mapping[str, str]
    """The columns that a spec cannot read, with the reason."""
    ambiguous: Sequence[str]
    """The columns whose only marks may be for decimals or for thousands."""
    is_complete: bool
    """Whether the end of the last file was read."""
    label: str | None
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
        for encoding in ("utf-8", "cp1252", "latin-1"):  # the last one reads any bytes
            with contextlib.suppress(UnicodeDecodeError):
                lines = content.decode(encoding).split("\n")
                break
        ends = first.count(b"\n")
        placed = {
            f"{paths[0]}, line {n}"
            if n <= ends
            else f"{paths[-1]}, line {n - ends} of its last million bytes": line.removeprefix(
                "\ufeff"
            )
            for n, line in enumerate(lines, 1)
            if line.strip()
        }
        if not placed:
            raise UsageError(f"{paths[0]}: the file has no lines")
        is_json = next(iter(placed.values())).lstrip()[0] in "[{"
        keys = {} if encoding == "utf-8" else {"encoding": encoding}
        read = _read_objects if is_json else _read_fields
        columns, cells, places, found = read(placed, label, keys)
        table, notes = _typed(columns, cells, places)
        return cls(
            table=table,
            rows=round(len(placed) * max(1.0, sum(map(os.path.getsize, paths)) / len(content))),
            notes=notes,
            is_complete=is_complete,
            **found,
        )


Parsed = tuple[dict[str, pa.Array], dict[str, Cells], list[str], dict[str, Any]]
"""The columns, with null for cells that do not fit; their cells; each row's place; and other fields of the sample."""


def _read_objects(placed: Mapping[str, str], label: str | None, keys: Mapping[str, Any]) -> Parsed:
    """Reads lines with one JSON object each. A job rejects other lines. `placed` has each line by its place."""
    objects: dict[str, dict[str, Any]] = {}
    for place, line in placed.items():
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(line), dict):
                objects[place] = value
    if len(objects) < _ALIKE * len(placed):
        raise UsageError(
            f"{next(iter(placed))}: the file begins like JSON, but {len(placed) - len(objects):,} of "
            f"{len(placed):,} lines are no object; write one object on each line (`jq -c '.[]'` does "
            "that for a list)"
        )
    columns: dict[str, pa.Array] = {}
    others: dict[str, str] = {}
    cells: dict[str, Cells] = {}
    names = dict.fromkeys(name for one in objects.values() for name in one)
    label = label or usual_label(names)
    for name in names:
        cells[name] = [one.get(name) for one in objects.values()]
        fitting = _without_few(cells[name], lambda one: not isinstance(one, str), name == label)
        try:
            read = flattened(pa.table({name: pa.array(fitting)}))
        except (pa.ArrowException, OverflowError):
            others[name] = "values of several types, or beyond 64 bits"
            continue
        except UnicodeEncodeError:
            others[name] = "texts that are not Unicode (half of a surrogate pair)"
            continue
        for part, values in zip(read.column_names, map(join_chunks, read.columns), strict=True):
            inner = values.type.value_type if pa.types.is_list(values.type) else pa.string()
            if pa.types.is_struct(values.type):
                others[part] = "objects without members"
            elif pa.types.is_string(inner) or pa.types.is_integer(inner):
                columns[part] = values
            else:
                others[part] = f"{values.type}, which a job cannot turn into ids"
    found = {"form": "json", "keys": keys, "others": others, "label": label, "ambiguous": ()}
    return columns, cells, [*objects], found


def _read_fields(placed: Mapping[str, str], label: str | None, keys: Mapping[str, Any]) -> Parsed:
    """Reads lines of fields with a delimiter between them. `placed` has each line by its place."""
    sign, rows = _cut(placed)
    first = next(iter(rows.values()))
    # Names of columns: none is empty, all differ, and none is a number.
    forms = (_NUMBERS[".", ""], _NUMBERS[",", ""])
    is_header = len(set(first)) == len(first) and not any(
        not cell or any(form.fullmatch(cell) for form in forms) for cell in first
    )
    names = first if is_header else [f"column_{number + 1}" for number in range(len(first))]
    rows = {place: row for place, row in rows.items() if not is_header or row != names}
    if not rows:
        raise UsageError(f"{next(iter(placed))}: the file has only a header")
    cells: dict[str, Cells] = {
        name: [cell.strip("\r") or None for cell in column]
        for name, column in zip(names, zip(*rows.values(), strict=True), strict=True)
    }
    clicks = (
        name for name in (names[0], names[-1]) if not is_header and set(cells[name]) == {"0", "1"}
    )
    label = label or next(clicks, usual_label(names))
    columns, marks, ambiguous = _read_numbers(cells, label)
    all_keys = {
        "delimiter": "" if sign == "\t" else sign,
        "header": is_header,
        **keys,
        **marks,
    }
    found = {
        "form": "tsv" if sign == "\t" else "csv",
        "keys": {key: value for key, value in all_keys.items() if value},
        "others": {},
        "label": label,
        "ambiguous": ambiguous,
    }
    return columns, cells, [*rows], found


def _read_numbers(
    cells: dict[str, Cells], label: str | None
) -> tuple[dict[str, pa.Array], dict[str, Any], list[str]]:
    """Returns the columns, the keys of `[input]` for their numbers, and the columns that may be read in two ways. In
    `cells`, texts for missing numbers become None."""
    words: set[str] = set()
    readings: dict[str, dict[tuple[str, str], Cells]] = {}
    for name, column in cells.items():
        given = [cell for cell in column if cell]
        if sum(map(bool, map(_PADDED.fullmatch, given))) > (1 - _ALIKE) * len(given):
            continue  # leading zeros belong to most of these texts
        rest = [None if cell in _MISSING else cell for cell in column]
        readings[name] = {
            marks: fitting
            for marks, form in _NUMBERS.items()
            if any(fitting := _without_few(rest, form.fullmatch, name == label))
            and all(cell is None or form.fullmatch(cell) for cell in fitting)
        }
        if readings[name]:
            words |= _MISSING.intersection(given)
            cells[name] = rest
    (decimal, thousands), ambiguous = _choose_marks(readings)
    columns = {}
    for name, column in cells.items():
        texts = readings.get(name, {}).get((decimal, thousands))
        if texts is None:
            columns[name] = pa.array(column, pa.string())
            continue
        texts = [text and text.replace(thousands, "").replace(decimal, ".") for text in texts]
        is_whole = all(text is None or _WHOLE.fullmatch(text) for text in texts)
        kind = int if is_whole else float
        numbers = [None if text is None else kind(text) for text in texts]
        columns[name] = pa.array(numbers, pa.int64() if is_whole else pa.float64())
    keys = {
        "decimal": decimal if decimal == "," else "",
        "thousands": thousands,
        "null_values": sorted(words),
    }
    return columns, keys, ambiguous


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
            if not any(path.suffix == ".parquet" for path in there):
                found += [str(path) for path in there if _NAMES.search(path.name)]
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


def _cut(placed: Mapping[str, str]) -> tuple[str, dict[str, list[str]]]:
    """Returns the delimiter, and the fields of each line that has as many of them as most."""
    cut: dict[str, list[list[str]]] = {}
    for sign in _DELIMITERS:
        with contextlib.suppress(csv.Error):
            reader = csv.reader(
                placed.values(),
                delimiter=sign,
                quoting=csv.QUOTE_NONE if sign == "\t" else csv.QUOTE_MINIMAL,
            )
            cut[sign] = list(reader)
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


def _choose_marks(
    readings: Mapping[str, Mapping[tuple[str, str], Cells]],
) -> tuple[tuple[str, str], list[str]]:
    """Returns the decimal mark and the mark of thousands, and the columns that may be read in two ways. Such a column
    decides nothing."""
    fits = {
        name: {*marks}
        for name, marks in readings.items()
        if not all(
            cell is None or _UNMARKED.fullmatch(cell) for cells in marks.values() for cell in cells
        )
    }
    ambiguous = [
        name
        for name, marks in fits.items()
        if {(".", ""), (",", ".")} <= marks or {(",", ""), (".", ",")} <= marks
    ]
    decimals = {name: {decimal for decimal, _ in marks} for name, marks in fits.items()}
    sure = set().union(*(one for one in decimals.values() if len(one) == 1))
    decimal = "," if sure == {","} else "."
    found = set[str]()
    for name, marks in fits.items():
        left = {thousands for one, thousands in marks if one == decimal}
        if len(left) == 1 and (sure or name not in ambiguous):
            found |= left
    thousands = found.pop() if len(found) == 1 else ""
    return (decimal, thousands), [] if sure or thousands else ambiguous


def _without_few(cells: Cells, fits: Callable[[Any], object], is_label: bool) -> Cells:
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
    columns: Mapping[str, pa.Array], cells: Mapping[str, Cells], places: Sequence[str]
) -> tuple[pa.Table, dict[str, dict[str, Any]]]:
    """Converts columns of texts that hold times. Returns the rows whose cells all fit their columns, and notes on the
    columns."""
    found, notes = dict(columns), dict[str, dict[str, Any]]()
    fits = np.ones(len(places), bool)
    for name, values in columns.items():
        note = notes.setdefault(name, {})
        is_text = pa.types.is_string(values.type)
        if is_text and (read := times_of(values, pc.unique(values.drop_null()))):
            note |= {"input_formats": read.formats, "swapped": read.swapped}
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
            note["rejected"] = f"{wrong_values} ({places[wrong[0]]})"
    return pa.table(found).filter(pa.array(fits)), notes
