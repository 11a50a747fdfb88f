"""Samples logs in lines of text for `sluice guess`: `TextSample` has some rows, their likely types, and how a spec
reads them. If a few values do not fit, their rows are left out, because a job rejects them."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import InputError, UsageError
from sluice.etl.apply.cells import TextCells
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.read.input_paths import InputFile, files_of
from sluice.etl.read.pieces import FileRange, Piece, is_compressed, pieces_of_ranges
from sluice.etl.spec.input_section import THOUSANDS, Input
from sluice.etl.spec.nested_columns import flattened, join_chunks
from sluice.ingest.plain.guess import share_of_values, times_of, usual_label

_NAMES = re.compile(r"\.(csv|tsv|txt|log|json|jsonl|ndjson)(\.(gz|bz2))?$", re.IGNORECASE)
_BYTES, _PIECES = 1 << 20, 64
"""Bytes to read at the beginning of the first file and at the end of the last. And how many times as many to decompress
of a compressed file at most, to find its end."""
_MISSING = ("#N/A", "-", "--", "?", "N/A", "NA", "NULL", "None", "\\N", "n/a", "null")
"""Texts that stand for a missing number."""
_NUMBER = rf"^[ \t]*(?:[+-]?[.,]?[0-9][0-9{''.join(THOUSANDS)}]*(?:[eE][+-]?[0-9]+)?|[nN]a[nN]|NAN)[ \t]*$"
"""A pattern of texts that may be numbers, with any marks."""
_MARKS = tuple(
    (decimal, thousands)
    for decimal in (".", ",")
    for thousands in ("", *THOUSANDS)
    if thousands != decimal
)
"""The marks for decimals and for thousands that a job reads."""
_LONGEST = 200
"""The number of texts that show a column's marks. Long numbers have the most."""
_DELIMITERS, _ALIKE = "\t;,|", 0.99
_PADDED = r"^0[0-9]+$"
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
    def of(cls, files: Sequence[InputFile], label: str | None = None) -> TextSample:
        """Samples these files, which are sorted by name. `label` is the label's name if it is known."""
        first, last = files[0], files[-1]
        lines, end, is_complete = _read_ends(first)
        if first is not last:
            *others, is_complete = _read_ends(last)
            end = others[1] or others[0]
        if lines and lines[0][:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UsageError(
                f"{first.path}: the file is UTF-16, in which line ends have other bytes; write it in UTF-8"
            )
        content = b"".join((*lines, *end))
        for encoding in ("utf-8", "cp1252", "latin-1"):  # the last one reads any bytes
            with contextlib.suppress(UnicodeDecodeError):
                content.decode(encoding)
                break
        at_end = f"{last.path}, line {{}} of its last million bytes"
        placed = {
            place.format(number): text.removesuffix("\n")
            for place, part in ((f"{first.path}, line {{}}", lines), (at_end, end))
            for number, line in enumerate(part, 1)
            if (text := line.decode(encoding)).strip()
        }
        if not placed:
            raise UsageError(f"{first.path}: the file has no lines")
        is_json = next(iter(placed.values())).lstrip()[0] in "[{"
        keys = {} if encoding == "utf-8" else {"encoding": encoding}
        read = _read_objects if is_json else _read_fields
        columns, cells, places, found = read(placed, label, keys)
        table, notes = _typed(columns, cells, places)
        return cls(
            table=table,
            rows=round(len(placed) * max(1.0, sum(file.size for file in files) / len(content))),
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
        texts = [cell for cell in cells[name] if isinstance(cell, str)]
        few = _are_few(texts, cells[name], name == label)
        numbers = [None if few and isinstance(cell, str) else cell for cell in cells[name]]
        try:
            read = flattened(pa.table({name: pa.array(numbers)}))
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
    is_header = len(set(first)) == len(first) and not any(
        not cell or re.match(_NUMBER, cell) for cell in first
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
    columns = {name: pa.array(column, pa.string()) for name, column in cells.items()}
    numbers: dict[str, pa.Array] = {}
    for name, texts in columns.items():
        given = pc.if_else(pc.is_in(texts, pa.array(_MISSING)), None, texts)
        likely = _share(given, _NUMBER) >= _ALIKE and _share(given, _PADDED) <= 1 - _ALIKE
        if likely or name == label:
            numbers[name] = given
    fits = {}
    for name, texts in numbers.items():
        likely = pc.unique(texts.filter(pc.match_substring_regex(texts, _NUMBER)))
        longest = likely.take(pc.sort_indices(pc.negate(pc.binary_length(likely)))[:_LONGEST])
        fits[name] = {marks for marks in _MARKS if not _cells(marks).convert(longest, "float")[1]}
    marks, ambiguous = _choose_marks(fits)
    words = set[str]()
    for name, texts in numbers.items():
        encoded = texts.dictionary_encode()
        read, bad = _cells(marks).convert(encoded.dictionary, "float")
        wrong = texts.filter(pc.is_in(encoded.indices, pa.array(bad, pa.int32())))
        if read.null_count == len(read) or not _are_few(
            wrong.to_pylist(), cells[name], name == label
        ):
            continue
        whole, not_whole = _cells(marks).convert(encoded.dictionary, "int")
        columns[name] = (whole if not_whole == bad else read).take(encoded.indices)
        words.update(set(_MISSING).intersection(cells[name]))
        cells[name] = texts.to_pylist()
    decimal, thousands = marks
    keys = {
        "decimal": decimal if decimal == "," else "",
        "thousands": thousands,
        "null_values": sorted(words),
    }
    return columns, keys, ambiguous


def _cells(marks: tuple[str, str]) -> TextCells:
    """Returns what reads numbers as a job does."""
    return TextCells(Input(columns={}, decimal=marks[0], thousands=marks[1]))


def _share(texts: pa.Array, pattern: str) -> float:
    """Returns the share of the texts that match."""
    return float(pc.mean(pc.match_substring_regex(texts, pattern)).as_py() or 0)


def text_files(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[InputFile]:
    """Returns the text files that `source` stands for. Empty if they are Parquet or do not exist."""
    names = [source] if isinstance(source, (str, os.PathLike)) else source
    try:
        files = [file for file in files_of(os.fspath(name) for name in names) if file.size]
    except InputError:  # whoever looks for Parquet names it
        return []
    files = [file for file in files if _NAMES.search(file.path)] or files
    for file in files:
        with file.open() as stream:
            if file.path.endswith(".parquet") or stream.read(4) == b"PAR1":
                return []
    return files


def _read_ends(file: InputFile) -> tuple[list[bytes], list[bytes], bool]:
    """Returns the first lines of a file, its last lines, and whether its end was read. A small file only has first
    lines. A compressed file must be read up to its end."""
    size = file.size if is_compressed(file) else _BYTES
    try:
        first, *others = islice(pieces_of_ranges([FileRange(file, 0, size, _BYTES)]), _PIECES)
        is_complete = len(others) < _PIECES - 1
        if not is_compressed(file) and file.size > _BYTES:
            start = max(_BYTES, file.size - _BYTES)
            others = [*pieces_of_ranges([FileRange(file, start, file.size - start, _BYTES)])]
        return _lines(first), _lines(others[-1]) if others else [], is_complete
    except JobFailure as error:
        raise UsageError(f"{file.path}: cannot be read, the file is damaged ({error})") from None


def _lines(piece: Piece) -> list[bytes]:
    return [line for batch in piece.batches() for line in batch["line"].to_pylist()]


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
    fits: Mapping[str, Collection[tuple[str, str]]],
) -> tuple[tuple[str, str], list[str]]:
    """Returns the marks that fit the most columns, and the columns that may be read in two ways. If there is no other
    column with marks, these decide nothing."""
    marked = {name: {*marks} for name, marks in fits.items() if 0 < len(marks) < len(_MARKS)}
    ambiguous = [
        name
        for name, marks in marked.items()
        if {(".", ""), (",", ".")} <= marks or {(",", ""), (".", ",")} <= marks
    ]
    sure = [name for name in marked if name not in ambiguous]
    if not sure:
        return _MARKS[0], ambiguous

    def count_fitting(marks: tuple[str, str]) -> tuple[int, ...]:
        return tuple(sum(marks in marked[name] for name in names) for names in (sure, ambiguous))

    return max(_MARKS, key=count_fitting), []


def _are_few(wrong: Cells, cells: Cells, is_label: bool) -> bool:
    """Whether so few cells are wrong that they are errors. A label has few distinct values, so its wrong ones must be
    rare compared with its 1."""
    given = [cell for cell in cells if cell is not None]
    if len(wrong) > (1 - _ALIKE) * len(given):
        return False
    if is_label:
        return 10 * len(wrong) <= given.count(1) + given.count("1")
    return not wrong or _DISTINCT * len(set(wrong)) < len(set(map(str, given)))


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
            note["input_formats"], seconds, _ = read
            microseconds = pc.multiply(seconds, 1e6).cast(pa.int64(), safe=False)
            at = microseconds.cast(pa.timestamp("us"))
            has_clock = any("%H" in one for one in note["input_formats"])
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
