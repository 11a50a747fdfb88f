"""A feature spec: what comes in, which columns go out and how each is made. `Spec.read` checks all of it at once.

Errors name the key's path in the file and the nearest right name.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from etl.fields import Field
from etl.names import nearest
from etl.ops import OPERATORS, Fitted, Operator, OperatorError

FORMATS = ("tsv", "csv", "json", "parquet")
INPUT_TYPES = {"int": "number", "float": "number", "text": "text"}
# What a chain must end in for a role, and the Arrow type that is stored.
ROLE_KINDS = {"label": ("number", "int8"), "weight": ("number", "float"), "dense": ("number", "float"),
              "sparse": ("id", "int32")}
DEFAULT_SPLIT = {"train": 0.8, "validation": 0.1, "test": 0.1}
MAX_WIDTH = 4096
_RANGE = re.compile(r"([A-Za-z_]+)(\d+)\.\.([A-Za-z_]+)(\d+)")


class SpecError(ValueError):
    """A spec that cannot be used: its message names the file, the key's path and what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The raw data: its format, and its columns in order with their types."""

    format: str
    columns: Mapping[str, str]
    delimiter: str = "\t"
    header: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """How rows are placed."""

    seed: int = 0
    row_group_rows: int = 32_768
    file_rows: int = 524_288
    split: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_SPLIT))


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """One column of the table."""

    name: str
    source: str
    """The input column it is made from."""
    role: str
    ops: tuple[Operator, ...] = ()
    width: int | None = None

    def state_key(self, number: int) -> str:
        """The name that the fitted state of its operator of that number has."""
        return f"{self.name}/{number}"

    @property
    def fitted(self) -> list[tuple[str, Fitted, int]]:
        return [(self.state_key(i), op, i) for i, op in enumerate(self.ops) if isinstance(op, Fitted)]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole spec, known to be consistent."""

    input: Input
    table: TableSpec
    columns: tuple[ColumnSpec, ...]
    text: str = field(repr=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Spec:
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SpecError(f"{path}: the spec cannot be read ({reason})") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "spec") -> Spec:
        try:
            return _spec(tomllib.loads(text), text)
        except tomllib.TOMLDecodeError as error:
            raise SpecError(f"{name}: not TOML: {error}") from None
        except SpecError as error:
            raise SpecError(f"{name}: {error}") from None

    @property
    def fitted(self) -> list[tuple[ColumnSpec, str, Fitted, int]]:
        """Every operator that learns: its column, its state's key, itself, its number in the chain."""
        return [(column, key, op, number) for column in self.columns for key, op, number in column.fitted]

    @property
    def fitted_hash(self) -> str:
        """Of all that a fitted state depends on; state of another hash is another spec's."""
        chains = {key: [column.source, [[op.name, dataclasses.asdict(op)] for op in column.ops[:number + 1]]]
                  for column, key, _, number in self.fitted}
        return hashlib.sha256(json.dumps(chains, sort_keys=True).encode()).hexdigest()[:16]

    def fields(self, cardinalities: Mapping[str, int]) -> tuple[Field, ...]:
        return tuple(Field(name=c.name, role=c.role, type=ROLE_KINDS[c.role][1], width=c.width,
                           cardinality=cardinalities.get(c.name), inputs=() if c.source == c.name else (c.source,))
                     for c in self.columns)


def _spec(raw: dict[str, Any], text: str) -> Spec:
    _known(raw, ("input", "table", "column"), "")
    source = _input(_section(raw, "input"))
    table = _table(_section(raw, "table"))
    entries = raw.get("column", [])
    if not isinstance(entries, list) or not entries:
        raise SpecError("column: there must be at least one [[column]]")
    columns = _columns(entries, source)
    labels = [c.name for c in columns if c.role == "label"]
    if len(labels) != 1:
        raise SpecError(f"column: exactly one must have role = \"label\", but {labels or 'none'} has")
    if not any(c.role in ("dense", "sparse") for c in columns):
        raise SpecError("column: none has role \"dense\" or \"sparse\": there is nothing to learn from")
    return Spec(input=source, table=table, columns=columns, text=text)


def _section(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise SpecError(f"{key}: must be a table, written [{key}]")
    return value


def _known(raw: Mapping[str, Any], known: Iterable[str], path: str) -> None:
    for key in raw:
        if key not in (known := tuple(known)):
            raise SpecError(f"{path}{'.' if path else ''}{key}: unknown key{nearest(key, known)}")


def _value(raw: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any, path: str) -> Any:
    value = raw.get(key, default)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise SpecError(f"{path}.{key} = {value!r}: must be {' or '.join(k.__name__ for k in kinds)}")
    return value


def _input(raw: dict[str, Any]) -> Input:
    _known(raw, ("format", "delimiter", "header", "columns"), "input")
    form = _value(raw, "format", str, "tsv", "input")
    if form not in FORMATS:
        raise SpecError(f"input.format = {form!r}: unknown format{nearest(form, FORMATS)}")
    delimiter = _value(raw, "delimiter", str, "\t" if form == "tsv" else ",", "input")
    if len(delimiter.encode()) != 1 or delimiter in "\r\n":
        raise SpecError(f"input.delimiter = {delimiter!r}: must be one character other than a line's end")
    columns: dict[str, str] = {}
    for number, entry in enumerate(_value(raw, "columns", list, [], "input")):
        path = f"input.columns[{number}]"
        names, _, kind = str(entry).partition(":")
        if kind not in INPUT_TYPES:
            raise SpecError(f"{path} = {entry!r}: write name:type{nearest(kind, INPUT_TYPES)}")
        for name in _expanded(names, path):
            if name in columns:
                raise SpecError(f"{path}: column {name!r} is there twice")
            columns[name] = kind
    if not columns:
        raise SpecError('input.columns: name the columns in order, for instance ["label:int", "I1..I13:int"]')
    return Input(format=form, delimiter=delimiter, header=_value(raw, "header", bool, False, "input"), columns=columns)


def _expanded(names: str, path: str) -> list[str]:
    """`I1..I13` is thirteen names, anything else one."""
    if match := _RANGE.fullmatch(names):
        if match[1] != match[3] or int(match[2]) > int(match[4]):
            raise SpecError(f"{path}: {names!r} is no range; write for instance I1..I13")
        return [f"{match[1]}{i}" for i in range(int(match[2]), int(match[4]) + 1)]
    if not names:
        raise SpecError(f"{path}: a column has no name")
    return [names]


def _table(raw: dict[str, Any]) -> TableSpec:
    _known(raw, [f.name for f in dataclasses.fields(TableSpec)], "table")
    whole: dict[str, Any] = {f.name: _value(raw, f.name, int, f.default, "table")
                             for f in dataclasses.fields(TableSpec) if f.name != "split"}
    for key in ("row_group_rows", "file_rows"):
        if whole[key] < 1:
            raise SpecError(f"table.{key} = {whole[key]}: must be at least 1")
    split = _value(raw, "split", dict, DEFAULT_SPLIT, "table")
    for name, share in split.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise SpecError(f"table.split.{name}: a split's name is letters, digits, - and _")
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
            raise SpecError(f"table.split.{name} = {share!r}: must be a share above 0, at most 1")
    if abs(sum(split.values()) - 1) > 1e-9:
        raise SpecError(f"table.split: the shares add up to {sum(split.values()):g}, not 1")
    return TableSpec(split=split, **whole)


_COLUMN_KEYS = ("name", "match", "from", "role", "ops", "embedding")


def _columns(entries: list[Any], source: Input) -> tuple[ColumnSpec, ...]:
    exact: dict[str, tuple[int, dict[str, Any]]] = {}
    wild: dict[str, tuple[int, dict[str, Any]]] = {}
    for number, entry in enumerate(entries):
        path = f"column[{number}]"
        if not isinstance(entry, dict):
            raise SpecError(f"{path}: must be a table, written [[column]]")
        _known(entry, _COLUMN_KEYS, path)
        if ("name" in entry) == ("match" in entry):
            raise SpecError(f"{path}: give either name or match")
        if "name" in entry:
            name = _value(entry, "name", str, "", path)
            if name in exact:
                raise SpecError(f"{path}.name = {name!r}: column[{exact[name][0]}] has this name already")
            exact[name] = (number, entry)
            continue
        pattern = _value(entry, "match", str, "", path)
        matched = [n for n in source.columns if fnmatch.fnmatchcase(n, pattern)]
        if not matched:
            raise SpecError(f"{path}.match = {pattern!r}: matches no input column{nearest(pattern, source.columns)}")
        for name in matched:
            if name in wild:
                raise SpecError(f"{path}.match = {pattern!r}: column[{wild[name][0]}] matches {name!r} too; "
                                "give that column a [[column]] with its name")
            wild[name] = (number, entry)
    chosen = {**wild, **exact}
    names = [n for n in source.columns if n in chosen] + [n for n in exact if n not in source.columns]
    return tuple(_column(name, chosen[name][1], f"column[{chosen[name][0]}]", source) for name in names)


def _column(name: str, raw: dict[str, Any], path: str, source: Input) -> ColumnSpec:
    if name == "split" or name.startswith("_"):
        raise SpecError(f"{path}.name = {name!r}: this name is the table's own")
    origin = _value(raw, "from", str, name, path)
    if origin not in source.columns:
        key = "from" if "from" in raw else "name"
        raise SpecError(f"{path}.{key} = {origin!r}: no such input column{nearest(origin, source.columns)}")
    role = _value(raw, "role", str, "", path)
    if role not in ROLE_KINDS:
        raise SpecError(f"{path}.role = {role!r}: unknown role{nearest(role, ROLE_KINDS)}")
    kind = INPUT_TYPES[source.columns[origin]]
    ops = []
    for number, entry in enumerate(_value(raw, "ops", list, [], path)):
        op = _operator(entry, f"{path}.ops[{number}]")
        if op.takes != kind and not (op.takes == "text" and number == 0):  # raw numbers can be read as text
            raise SpecError(f"{path}.ops[{number}]: {op.name} takes {op.takes}, but column {name!r} is {kind} here")
        ops.append(op)
        kind = op.gives
    wanted = ROLE_KINDS[role][0]
    if kind != wanted:
        hint = "categorify or hash" if wanted == "id" else "an operator that gives numbers"
        raise SpecError(f"{path}: column {name!r} has role {role!r}, which needs {wanted}, but its operators end in "
                        f"{kind}; add {hint}")
    if role in ("dense", "weight") and not any(op.name == "fill" for op in ops):
        raise SpecError(f"{path}: column {name!r} may have nulls, which a {role} column cannot store; add "
                        '{op = "fill"}')
    return ColumnSpec(name=name, source=origin, role=role, ops=tuple(ops), width=_width(raw, role, path))


def _width(raw: dict[str, Any], role: str, path: str) -> int | None:
    if "embedding" not in raw:
        return None
    if role != "sparse":
        raise SpecError(f"{path}.embedding: a {role} column has none")
    embedding = _value(raw, "embedding", dict, {}, path)
    _known(embedding, ("width",), f"{path}.embedding")
    width = _value(embedding, "width", int, 0, f"{path}.embedding")
    if not 1 <= width <= MAX_WIDTH:
        raise SpecError(f"{path}.embedding.width = {width}: must be from 1 to {MAX_WIDTH}")
    return int(width)


def _operator(raw: Any, path: str) -> Operator:
    if not isinstance(raw, dict) or "op" not in raw:
        raise SpecError(f'{path} = {raw!r}: write {{op = "name", …}}')
    if raw["op"] not in OPERATORS:
        raise SpecError(f"{path}.op = {raw['op']!r}: unknown operator{nearest(str(raw['op']), OPERATORS)}")
    kind = OPERATORS[raw["op"]]
    parameters = {f.name: f for f in dataclasses.fields(kind)}
    _known({k: v for k, v in raw.items() if k != "op"}, parameters, path)
    hints = get_type_hints(kind)
    given = {}
    for key, parameter in parameters.items():
        if key in raw:
            number = (int, float) if "float" in str(hints[key]) else (int,)
            given[key] = _value(raw, key, number, None, path)
            if number != (int,):
                given[key] = float(given[key])
        elif parameter.default is dataclasses.MISSING:
            raise SpecError(f"{path}: {kind.name} needs {key}")
    try:
        return kind(**given)
    except OperatorError as error:
        raise SpecError(f"{path}.{error}") from None
