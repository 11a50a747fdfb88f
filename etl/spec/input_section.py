"""The [input] section of a spec: `Input`, the format of the raw data and the types of its columns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa

from sluice.common.suggest import nearest
from sluice.etl.ops.timestamps import ParseTime
from sluice.etl.spec.columns import read_operator
from sluice.etl.spec.toml_keys import (
    Columns,
    SpecError,
    check_keys,
    read_encoding,
    read_into,
    read_value,
)

TABLES = ("delta", "iceberg")
WITH_COLUMNS = ("parquet", *TABLES)
NUMBERS = ("int", "float")
ARROW_TYPES = {
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
    "texts": pa.list_(pa.string()),
    "floats": pa.list_(pa.float64()),
}
THOUSANDS = (".", ",", " ", "'", "\u00a0", "\u202f")
"""The marks that may separate thousands in texts of numbers."""
INPUT_TYPES = {
    "int": "number",
    "float": "number",
    "text": "text",
    "texts": "texts",
    "floats": "numbers",
}
_FORMATS_OF_KEY = {
    "optional": ("parquet", "csv", "tsv"),
    **dict.fromkeys(("decimal", "thousands", "null_values", "encoding"), ("tsv", "csv", "json")),
    "place": ("tsv", "csv", "json", "parquet"),
}
_ABOUT = ("name", "was", "also", "format", "zone")
_RANGE = re.compile(r"([A-Za-z_]+)(\d+)\.\.([A-Za-z_]+)(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The raw data: its format, and its columns in order with their types."""

    format: Literal["tsv", "csv", "json", "parquet", "delta", "iceberg"] = "tsv"
    columns: Mapping[str, str]
    delimiter: str = "\t"
    header: bool = False
    multiline: bool = False
    """Whether a quoted field of csv may contain line ends."""
    optional: Columns = ()
    """Columns that a file may lack. Their values are then null. In tsv and csv they are the last columns, and a line
    ends before them."""
    was: Mapping[str, str] = field(default_factory=dict)
    """The name or the type that a column had in an earlier version of the table."""
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other names that a column may have in files and requests. The first of its names that has a value counts."""
    times: Mapping[str, ParseTime] = field(default_factory=dict)
    """The parsers of number columns that the input holds as texts of times."""
    encoding: str = "utf-8"
    """Python's name for the encoding of lines."""
    decimal: str = "."
    """The decimal mark of numbers in texts: a point or a comma."""
    thousands: str = ""
    """The mark that may stand between groups of three digits in texts of numbers."""
    null_values: tuple[str, ...] = ()
    """The texts that stand for a missing number or time."""
    number_texts: bool = False
    """Whether numbers may be texts in JSON and in requests."""
    marks: tuple[str, ...] = ()
    """Columns that do not affect the order of rows. Only the search for leaks in `tests/fuzz` adds such columns."""
    place: str | None = None
    """The name of a column that no file has: the share of the input's rows that lie before a row, files by name."""

    @property
    def is_table(self) -> bool:
        """Whether the metadata of a table lists the files."""
        return self.format in TABLES

    @property
    def has_columns(self) -> bool:
        """Whether the files have columns with types. Other files have lines."""
        return self.format in WITH_COLUMNS

    @property
    def read_as(self) -> dict[str, str]:
        """The columns with the types that they have in files: times are texts there."""
        return {name: "text" if name in self.times else kind for name, kind in self.columns.items()}

    @property
    def schema(self) -> pa.Schema:
        """The columns as `read_as`, with their types in Arrow."""
        return pa.schema([(name, ARROW_TYPES[kind]) for name, kind in self.read_as.items()])

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """All names that each column may have in files and requests."""
        return {name: (name, *self.also.get(name, ())) for name in self.columns}

    @property
    def column_of(self) -> dict[str, str]:
        """Maps each name to its column."""
        return {name: column for column, names in self.names.items() for name in names}

    def name_before(self, earlier: Input, name: str) -> str:
        """Returns the name that a column had in an earlier spec. A rename that stood there before says nothing new."""
        was = self.was.get(name, name)
        return name if name in earlier.columns and earlier.was.get(name) == was else was

    @property
    def with_place(self) -> dict[str, str]:
        """The columns of a row before joins and histories add others, with their types."""
        return {**self.columns, **({self.place: "float"} if self.place else {})}


def read_input(raw: dict[str, Any]) -> Input:
    form = raw.get("format", "tsv")
    raw.setdefault("delimiter", "\t" if form == "tsv" else ",")
    entries = raw.pop("columns", [])
    columns, was, also, times = _read_columns(entries, form)
    if also and not (raw.get("header") or form in ("json", *WITH_COLUMNS)):
        raise SpecError(
            f"input.columns: `also` needs names in the files: {form} with header = true, or another format"
        )
    source = read_into(
        Input,
        raw,
        "input",
        columns,
        columns=columns,
        was=was,
        also=also,
        times=times,
        number_texts=bool({"decimal", "thousands", "null_values"} & raw.keys()),
        marks=(),
    )
    for key, formats in _FORMATS_OF_KEY.items():
        if key in raw and form not in formats:
            raise SpecError(
                f"input.{key}: needs input.format {' or '.join(formats)}, and it is {form!r}"
            )
    # In formats of lines, a line ends before the columns that it lacks.
    optional = set(source.optional)
    required = list(columns)[: len(columns) - len(optional)]
    if form != "parquet" and optional and (not required or optional & set(required)):
        raise SpecError(
            f"input.optional = {list(source.optional)}: in {form} they must be the last of input.columns, because "
            "lines without them end before them"
        )
    place = source.place
    if place is not None and (place in columns or not place or place.startswith("_")):
        raise SpecError(f"input.place = {place!r}: must be the name of a new column")
    _check_texts(source)
    return replace(source, encoding=read_encoding(source.encoding, "input", source.delimiter))


def _read_columns(
    entries: Any, form: str
) -> tuple[dict[str, str], dict[str, str], dict[str, tuple[str, ...]], dict[str, ParseTime]]:
    """Returns the columns, their names or types in earlier versions, their other names, and the parsers of their
    times."""
    columns: dict[str, str] = {}
    was: dict[str, str] = {}
    also: dict[str, tuple[str, ...]] = {}
    times: dict[str, ParseTime] = {}
    for number, entry in enumerate(read_value(entries, list, "input.columns")):
        path = f"input.columns[{number}]"
        about = entry if isinstance(entry, dict) else {"name": str(entry)}
        check_keys(about, _ABOUT, path)
        names, _, kind = read_value(about.get("name"), str, f"{path}.name").rpartition(":")
        if "was" in about:
            was[names] = read_value(about["was"], str, f"{path}.was")
        if "also" in about:
            also[names] = read_value(about["also"], tuple[str, ...], f"{path}.also")
        if kind not in INPUT_TYPES:
            raise SpecError(f"{path} = {entry!r}: write name:type{nearest(kind, INPUT_TYPES)}")
        if kind in ("texts", "floats") and form not in ("json", *WITH_COLUMNS):
            raise SpecError(
                f"{path} = {entry!r}: {form} has no lists; read it as text, and add "
                '{op = "split"} to its column'
            )
        for name in _expand_range(names, path):
            if name in columns:
                raise SpecError(f"{path}: column {name!r} is there twice")
            columns[name] = kind
            if {"format", "zone"} & about.keys():
                times[name] = read_time(about, kind, path)
    if not columns:
        raise SpecError(
            'input.columns: name the columns in order, for instance ["label:int", "I1..I13:int"]'
        )
    for key, given in (("was", was), ("also", also)):
        if wide := next((name for name in given if name not in columns), None):
            raise SpecError(
                f"input.columns: {wide!r} has `{key}`, and so must be one column, not a range"
            )
    for name, old in was.items():
        if list(was.values()).count(old) > 1:
            raise SpecError(f"input.columns: two columns were {old!r}")
        if old in columns and old != name and old not in was:
            raise SpecError(
                f"input.columns: {name!r} was {old!r}, but there is an input column {old!r} too"
            )
    taken = {*columns}
    for name, others in also.items():
        for other in others:
            if other in taken or not other:
                raise SpecError(
                    f"input.columns: {name!r} has also = {other!r}: another column has this name already"
                )
            taken.add(other)
    return columns, was, also, times


def _expand_range(names: str, path: str) -> list[str]:
    """Expands a range of names: `I1..I13` is thirteen names. Anything else is one name."""
    if match := _RANGE.fullmatch(names):
        if match[1] != match[3] or int(match[2]) > int(match[4]):
            raise SpecError(f"{path}: {names!r} is no range; write for instance I1..I13")
        return [f"{match[1]}{i}" for i in range(int(match[2]), int(match[4]) + 1)]
    if not names:
        raise SpecError(f"{path}: a column has no name")
    return [names]


def read_time(about: Mapping[str, Any], kind: str, path: str) -> ParseTime:
    """Returns the operator that makes a column's texts into times."""
    if kind not in ("int", "float") or "format" not in about:
        raise SpecError(
            f"{path} = {about!r}: a time becomes seconds since 1970, as a float or an int; write "
            '{name = "at:float", format = "%Y-%m-%d", zone = "UTC"}'
        )
    given = {key: about[key] for key in ("format", "zone") if key in about}
    op, _ = read_operator({"op": ParseTime.name, **given}, path)
    assert isinstance(op, ParseTime)
    return op


def _check_texts(source: Input) -> None:
    """Checks that the marks of numbers differ, and that no number stands for a missing one."""
    # Only csv has quotes, in which a mark may be the delimiter.
    taken = (source.delimiter,) if source.format == "tsv" else ()
    if source.decimal not in (".", ",") or source.decimal in taken:
        raise SpecError(
            f"input.decimal = {source.decimal!r}: must be a point or a comma, and in tsv differ from "
            f"input.delimiter = {source.delimiter!r}"
        )
    taken = (*taken, source.decimal)
    if source.thousands and (source.thousands not in THOUSANDS or source.thousands in taken):
        raise SpecError(
            f"input.thousands = {source.thousands!r}: must be one of {', '.join(map(repr, THOUSANDS))}, and "
            "differ from the decimal mark, and in tsv from input.delimiter"
        )
    for text in source.null_values:
        try:
            float(text.replace(source.thousands, "").replace(source.decimal, "."))
        except ValueError:
            continue
        raise SpecError(
            f"input.null_values: {text!r} is a number, which requests could not tell from others; "
            "list only texts"
        )
