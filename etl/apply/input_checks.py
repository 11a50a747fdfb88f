"""Checks a job's input before any row is read: other headers, Parquet files with other columns. Reads no files
itself."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate, product
from urllib.parse import unquote

from sluice.common.errors import InputError
from sluice.etl.spec.input_section import Input

Part = tuple[str, int]
"""A file and the number of its piece."""
Before = tuple[Mapping[Part, int], int]
"""The number of rows before each part of the input, and of all rows."""


def headers_of(source: Input) -> tuple[str, ...]:
    """Returns the lines that are no rows: the possible headers of a file, and the empty line, unless rows have a single
    field. In CSV, a header may quote all names, or those that need it."""
    names, sign = list(source.columns), source.delimiter
    is_row = source.has_columns or (source.format != "json" and len(names) == 1)
    blank = () if is_row else ("",)
    if not source.header:
        return blank
    headers = set[str]()
    for written in product(*source.names.values()):
        quoted = [f'"{name.replace(chr(34), chr(34) * 2)}"' for name in written]
        needed = [
            inside if sign in name or '"' in name else name
            for name, inside in zip(written, quoted, strict=True)
        ]
        ways = [written, needed, quoted] if source.format == "csv" else [written]
        headers |= {
            sign.join(way[: len(names) - lacking])
            for way in ways
            for lacking in range(len(source.optional) + 1)
        }
    return (*(headers - {""}), *blank)


def rows_before(counts: Mapping[Part, int]) -> Before:
    """Counts the rows before each part, given those of each. Files are in the order of their names."""
    parts = sorted(counts, key=lambda part: (unquote(part[0]), part[1]))
    ends = list(accumulate(counts[part] for part in parts))
    return {part: end - counts[part] for part, end in zip(parts, ends, strict=True)}, ends[
        -1
    ] if ends else 0


def refuse_header(file: str, line: str, source: Input) -> None:
    """Raises an InputError if a file's first line differs from the spec's columns."""
    line = line.rstrip("\r")
    have, want = line.split(source.delimiter), list(source.columns)
    if line in ("", *headers_of(source)):  # an empty file has an empty line
        return
    if line.startswith("PAR1"):
        raise InputError(
            f"{file}: it is a Parquet file, and the spec has input.format = {source.format!r}; `sluice guess` makes a "
            "spec for it"
        )
    if source.format == "csv":
        names = next(csv.reader([line], delimiter=source.delimiter))
        if names != want[: len(names)]:  # otherwise only the quotes differ
            have = names
    have = [source.column_of.get(name, name) for name in have]
    if have != want[: len(have)] or len(have) < len(want) - len(source.optional):
        place = next(
            (i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b),
            min(len(have), len(want)),
        )
        better = (
            f"it is not {source.encoding.upper()}: name its input.encoding, such as cp1252"
            if "\ufffd" in line  # the decoder writes this character for other bytes
            else "make the file's columns those of input.columns, of which the last may be input.optional"
        )
        shown = [repr(side[place]) if place < len(side) else "no column" for side in (have, want)]
        raise InputError(
            f"{file}: its header has {shown[0]} in column {place + 1}, where the spec has {shown[1]} (it "
            f"has {len(have)} columns, the spec {len(want)}); {better}"
        )


def refuse_lacking(
    files: Mapping[str, Collection[str]], columns: Iterable[str], optional: Collection[str]
) -> None:
    """Raises an InputError if a file lacks a column that another file has, unless the column is `optional`. `files` has
    the columns of each file."""
    for column in columns:
        having = next((file for file, there in files.items() if column in there), None)
        for file, there in files.items() if having else ():
            if column not in there and column not in optional:
                raise InputError(
                    f"{file}: there is no column {column!r}, which {having} has; write it there, or "
                    "list it in input.optional, to have nulls there"
                )


def refuse_missing(named: str, have: Collection[str], wanted: Iterable[str]) -> None:
    """Raises an InputError if a wanted column is in none of the files."""
    for name in wanted:
        if name not in have:
            raise InputError(f"{named}: there is no column {name!r} (there are: {', '.join(have)})")
