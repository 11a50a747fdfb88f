"""Samples logs in lines of text, to guess how a spec reads them: `LogSample` has the cells of some lines, and their
likely types. If a few values do not fit, a job rejects them."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import InputError, UsageError
from sluice.etl.apply.cells import TextCells
from sluice.etl.apply.lines import Delimited
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.read.input_paths import InputFile, files_of
from sluice.etl.read.pieces import FileRange, is_compressed
from sluice.etl.spec.input_section import THOUSANDS, Input
from sluice.etl.spec.nested_columns import flattened, join_chunks

_NAMES = re.compile(r"\.(csv|tsv|txt|log|json|jsonl|ndjson)(\.(gz|bz2))?$", re.IGNORECASE)
_BYTES, _PIECES = 1 << 20, 64
"""Bytes to read at the beginning of the first file and at the end of the last. And how many times as many to decompress
of a compressed file at most, to find its end."""
_MISSING = ("#N/A", "-", "--", "?", "N/A", "NA", "NULL", "None", "\\N", "n/a", "null")
"""Texts that stand for a missing number."""
_NUMBER = rf"^[ \t]*(?:[+-]?[.,]?[0-9][0-9{''.join(THOUSANDS)}]*(?:[eE][+-]?[0-9]+)?|[nN]a[nN]|NAN)[ \t]*$"
"""A pattern of texts that may be numbers, with any marks."""
_MARKS = [(d, t) for d in (".", ",") for t in ("", *THOUSANDS) if t != d]
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


def text_files(paths: Iterable[str]) -> list[InputFile]:
    """Returns the text files that these paths name. Empty if they are Parquet or do not exist."""
    try:
        files = [file for file in files_of(paths) if file.size]
    except InputError:  # whoever looks for Parquet names it
        return []
    files = [file for file in files if _NAMES.search(file.path)] or files
    for file in files:
        with file.open() as stream:
            if file.path.endswith(".parquet") or stream.read(4) == b"PAR1":
                return []
    return files


@dataclass(frozen=True, slots=True)
class LogSample:
    """The cells of some lines, cut as a job cuts them."""

    form: str
    """The format's name in a spec."""
    keys: Mapping[str, Any]
    """The keys of `[input]`, except format and columns."""
    cells: Mapping[str, Cells]
    """The cells of each column. None: the cell is empty, or a line lacks it."""
    places: Sequence[str]
    """The file and the line of each row."""
    rows: int
    """The estimated number of all rows."""
    is_complete: bool
    """Whether the end of the last file was read."""
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    """The columns with their types. Null for a cell that is missing, or does not fit its column."""
    texts: Mapping[str, pa.Array] = field(default_factory=dict)
    """For each column of which not all cells are texts: the cells that are. Null for a text that means a missing
    number."""
    others: Mapping[str, str] = field(default_factory=dict)
    """The columns that a spec cannot read, with the reason."""
    ambiguous: Sequence[str] = ()
    """The columns whose only marks may be for decimals or for thousands."""

    def marks(self) -> Iterator[str]:
        """Yields how lines, texts and numbers are written, with comments."""
        mark = next((key for key in self.keys if key in ("decimal", "thousands")), None)
        for key, value in self.keys.items():
            if key == mark:
                yield "# Numbers have these marks in the sample. A job rejects rows with others."
            if key == "null_values":
                yield "# In columns of numbers, these texts mean that the value is missing."
            yield f"{key} = {json.dumps(value)}"
        for name in self.ambiguous:
            yield (
                f"# {name}: its mark may be for decimals or for thousands. The guess changes nothing. If it is for "
                "thousands, add decimal and thousands here."
            )

    @classmethod
    def of(cls, files: Sequence[InputFile]) -> LogSample:
        """Samples these files, which are sorted by name."""
        first, last = files[0], files[-1]
        lines, end, is_complete = _read_ends(first)
        if first is not last:
            begin, end, is_complete = _read_ends(last)
            end = end or begin
        content = b"".join((*lines, *end))
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UsageError(
                f"{first.path}: the file is UTF-16, in which line ends have other bytes; write it in UTF-8"
            )
        for encoding in ("utf-8", "cp1252", "latin-1"):  # the last one reads any bytes
            with contextlib.suppress(UnicodeDecodeError):
                content.decode(encoding)
                break
        at_end = f"{last.path}, line {{}} of its last million bytes"
        placed = {
            place.format(number): text.rstrip("\r\n")
            for place, part in ((f"{first.path}, line {{}}", lines), (at_end, end))
            for number, line in enumerate(part, 1)
            if (text := line.decode(encoding)).strip()
        }
        if not placed:
            raise UsageError(f"{first.path}: the file has no lines")
        is_json = next(iter(placed.values())).lstrip()[0] in "[{"
        form, keys, cells, places = (_read_objects if is_json else _read_fields)(placed)
        keys |= {} if encoding == "utf-8" else {"encoding": encoding}
        rows = round(len(placed) * max(1.0, sum(file.size for file in files) / len(content)))
        return cls(form, keys, cells, places, rows, is_complete)

    @property
    def clicks(self) -> str | None:
        """The first column, or else the last, if it only holds 0 and 1 and lines have no header."""
        names = [] if self.form == "json" or "header" in self.keys else [*self.cells]
        ends = (*names[:1], *names[-1:])
        return next((name for name in ends if {*self.cells[name]} == {"0", "1"}), None)

    def typed(self, label: str | None) -> LogSample:
        """Returns the sample with the types of its columns. `label` is the name of the label."""
        return (_type_objects if self.form == "json" else _type_fields)(self, label)


Parsed = tuple[str, dict[str, Any], dict[str, Cells], list[str]]
"""The form, the keys, the cells and the places of a sample."""


def _read_objects(placed: Mapping[str, str]) -> Parsed:
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
    names = dict.fromkeys(name for row in objects.values() for name in row)
    cells: dict[str, Cells] = {name: [row.get(name) for row in objects.values()] for name in names}
    return "json", {}, cells, [*objects]


def _type_objects(sample: LogSample, label: str | None) -> LogSample:
    columns, texts = dict[str, pa.Array](), dict[str, pa.Array]()
    others: dict[str, str] = {}
    for name, cells in sample.cells.items():
        words = [cell if isinstance(cell, str) else None for cell in cells]
        few = _are_few(len(words) - words.count(None), cells, name == label)
        values = [None if isinstance(cell, str) and (few or not cell) else cell for cell in cells]
        try:
            texts[name] = pa.array(words, pa.string())
            read = flattened(pa.table({name: pa.array(values)}))
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
    return replace(sample, columns=columns, texts=texts, others=others)


def _read_fields(placed: Mapping[str, str]) -> Parsed:
    """Reads lines of fields with a delimiter between them. `placed` has each line by its place."""
    sign, rows = "", dict[str, list[str | None]]()
    width = 1
    for mark in _DELIMITERS:
        if sum(mark in line for line in placed.values()) < _ALIKE * len(placed):
            continue
        source = Input(columns={}, format="tsv" if mark == "\t" else "csv", delimiter=mark)
        lines = Delimited(source)
        cut = {place: lines.cells(line.encode()) or () for place, line in placed.items()}
        usual, count = Counter(map(len, cut.values())).most_common(1)[0]
        if usual > width and count >= _ALIKE * len(placed):
            sign, width = mark, usual
            rows = {
                place: [cell.decode() if cell else None for cell in row]
                for place, row in cut.items()
                if len(row) == width
            }
    if not sign:
        hint = ""
        if any('"' in line for line in placed.values()):
            hint = (
                ". Some lines have quotes that may not end. If quoted fields hold line ends, guess from a copy that "
                "has none, and add multiline = true to [input] of the spec. If quotes are ordinary characters, guess "
                'from a copy without quotes, and write format = "tsv" in the spec, with the delimiter that it has'
            )
        raise UsageError(
            f"{next(iter(placed))}: the file is neither Parquet, nor one JSON object a line, nor lines with equally "
            f"many fields separated by tab ; , or |{hint}"
        )
    first = next(iter(rows.values()))
    # Names of columns: none is empty, all differ, and none is a number.
    is_header = len({*first}) == width and not any(
        not cell or re.match(_NUMBER, cell) for cell in first
    )
    names = [name if is_header else f"column_{n}" for n, name in enumerate(first, 1)]
    rows = {place: row for place, row in rows.items() if not is_header or row != first}
    if not rows:
        raise UsageError(f"{next(iter(placed))}: the file has only a header")
    keys = {"delimiter": sign} if sign != "\t" else {}
    columns = zip(names, zip(*rows.values(), strict=True), strict=True)
    return (
        "tsv" if sign == "\t" else "csv",
        keys | ({"header": True} if is_header else {}),
        {str(name): cells for name, cells in columns},
        [*rows],
    )


def _type_fields(sample: LogSample, label: str | None) -> LogSample:
    """Makes numbers of the columns that hold them, by the marks that fit the most columns."""
    columns = {name: pa.array(cells, pa.string()) for name, cells in sample.cells.items()}
    numbers, read_texts = dict[str, pa.Array](), dict[str, pa.Array]()
    fits = {}
    for name, texts in columns.items():
        given = pc.if_else(pc.is_in(texts, pa.array(_MISSING)), None, texts)
        if name != label and (
            _share(given, _NUMBER) < _ALIKE or _share(given, _PADDED) > 1 - _ALIKE
        ):
            continue
        numbers[name] = given
        likely = given.filter(pc.match_substring_regex(given, _NUMBER)).unique()
        longest = likely.take(pc.sort_indices(pc.negate(pc.binary_length(likely)))[:_LONGEST])
        fits[name] = {marks for marks in _MARKS if not _cells(marks).convert(longest, "float")[1]}
    marks, ambiguous = _choose_marks(fits)
    words = set[str]()
    for name, texts in numbers.items():
        encoded = texts.dictionary_encode()
        read, bad = _cells(marks).convert(encoded.dictionary, "float")
        wrong = texts.filter(pc.is_in(encoded.indices, pa.array(bad, pa.int32())))
        few = _are_few(len(wrong), sample.cells[name], name == label)
        if read.null_count == len(read) or not few:
            continue
        # Where few values occur, a text may be one of them.
        if name != label and len(texts.unique()) <= _DISTINCT * len(wrong.unique()):
            continue
        whole, not_whole = _cells(marks).convert(encoded.dictionary, "int")
        columns[name] = (whole if not_whole == bad else read).take(encoded.indices)
        words.update({*_MISSING}.intersection(sample.cells[name]))
        read_texts[name] = texts
    more = {
        "decimal": marks[0].strip("."),
        "thousands": marks[1],
        "null_values": sorted(words),
    }
    keys = {**sample.keys, **{key: value for key, value in more.items() if value}}
    return replace(sample, columns=columns, texts=read_texts, keys=keys, ambiguous=ambiguous)


def _cells(marks: tuple[str, str]) -> TextCells:
    """Returns what reads numbers as a job does."""
    return TextCells(Input(columns={}, decimal=marks[0], thousands=marks[1]))


def _share(texts: pa.Array, pattern: str) -> float:
    """Returns the share of the texts that match."""
    return float(pc.mean(pc.match_substring_regex(texts, pattern)).as_py() or 0)


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
    if len(ambiguous) == len(marked):
        return _MARKS[0], ambiguous
    fitting = Counter(mark for marks in marked.values() for mark in marks)
    return max(_MARKS, key=lambda marks: fitting[marks]), []


def _are_few(wrong: int, cells: Cells, is_label: bool) -> bool:
    """Whether so few cells are `wrong` that they are errors. Those of a label must be rare compared with its 1."""
    given = [cell for cell in cells if cell is not None]
    ones = given.count(1) + given.count("1")
    return wrong <= (1 - _ALIKE) * len(given) and (not is_label or 10 * wrong <= ones)


def _read_ends(file: InputFile) -> tuple[list[bytes], list[bytes], bool]:
    """Returns the first lines of a file, the last lines of a large one, and whether its end was read. A compressed file
    must be read up to its end."""
    size, end = _BYTES, max(_BYTES, file.size - _BYTES)
    if is_compressed(file):
        size = end = file.size
    ranges = [FileRange(file, 0, size, _BYTES)]
    if end < file.size:
        ranges.append(FileRange(file, end, file.size - end, _BYTES))
    try:
        pieces = [*islice(chain.from_iterable(part.pieces() for part in ranges), _PIECES)]
        first, last = (
            [
                line
                for piece in part
                for batch in piece.batches()
                for line in batch["line"].to_pylist()
            ]
            for part in (pieces[:1], pieces[1:][-1:])
        )
    except JobFailure as error:
        raise UsageError(f"{file.path}: cannot be read, the file is damaged ({error})") from None
    return first, last, len(pieces) < _PIECES
