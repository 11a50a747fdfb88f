"""The [[column]] entries of a spec: `ColumnSpec`, one column of the table and how it is made."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from sluice.common.suggest import nearest
from sluice.etl.ops import OPERATORS, Fitted, Operator, OperatorError
from sluice.etl.ops.base import LISTS, is_wide
from sluice.etl.ops.chain import follow
from sluice.etl.ops.numeric import Fill, Missing, OneHot
from sluice.etl.ops.scaling import FillMean, FillMedian
from sluice.etl.ops.user_function import Python
from sluice.etl.spec.toml_keys import SpecError, known, texts, value

# For each role, the kind that a chain must end in, and the Arrow type that is stored.
ROLE_KINDS = {
    "label": ("number", "int8"),
    "weight": ("number", "float"),
    "dense": ("number", "float"),
    "sparse": ("id", "int32"),
    "id_list": ("ids", "binary"),
    "time": ("number", "double"),
    "key": ("text", "string"),
}
MAX_WIDTH = 4096
MAX_LEVELS = 3
_COLUMN_KEYS = ("name", "match", "from", "role", "ops", "embedding")
_FILLS = (Fill, FillMean, FillMedian)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """One column of the table."""

    name: str
    sources: tuple[str, ...]
    """The input columns it is made from."""
    role: str
    ops: tuple[Operator, ...] = ()
    online: int | None = None
    """The number of the first operator that is left to the loader; None: Spark applies all."""
    left_as: str = ""
    """Arrow's name of the type in which it is then stored."""
    raw: bool = False
    """Whether it is then stored as texts, numbers or lists in which nulls stay nulls."""
    width: int | None = None

    def state_key(self, number: int) -> str:
        """The name of the fitted state of this column's operator of that number."""
        joint = getattr(self.ops[number], "joint", "")
        return f"joint/{joint}" if joint else f"{self.name}/{number}"

    @property
    def fitted(self) -> list[tuple[str, Fitted, int]]:
        return [
            (self.state_key(i), op, i) for i, op in enumerate(self.ops) if isinstance(op, Fitted)
        ]

    @property
    def left_to_spark(self) -> tuple[Operator, ...]:
        return self.ops[: self.online]

    @property
    def wide(self) -> bool:
        """Whether it has ids that do not fit int32."""
        return any(
            is_wide(op.cardinality(None))
            for op in self.ops
            if op.gives == "id" and not isinstance(op, Fitted)
        )

    @property
    def type(self) -> str:
        """Arrow's name of the type that is stored; for bags, of the type in which they are packed."""
        return self.left_as or (
            "int64" if self.role == "sparse" and self.wide else ROLE_KINDS[self.role][1]
        )

    @property
    def left_to_loader(self) -> tuple[dict[str, Any], ...]:
        """The online operators as `Field.online` holds them: plain values, which include where their state is."""
        if self.online is None:
            return ()
        return tuple(
            {
                "op": op.name,
                **{
                    k: list(v) if isinstance(v, tuple) else v
                    for k, v in dataclasses.asdict(op).items()
                },
                **({"state": self.state_key(number)} if isinstance(op, Fitted) else {}),
            }
            for number, op in enumerate(self.ops)
            if number >= self.online
        )

    def level(self, number: int) -> int:
        """The fitting pass of this column's operator of that number: 0 if no operator before it learns anything."""
        return sum(isinstance(op, Fitted) for op in self.ops[:number])


def read_columns(
    entries: list[tuple[str, dict[str, Any]]], kinds: Mapping[str, str]
) -> tuple[ColumnSpec, ...]:
    """Reads all columns. A wildcard's columns come in the order of `kinds`, the input columns; an exact name beats a
    wildcard."""
    exact: dict[str, tuple[str, dict[str, Any]]] = {}
    wild: dict[str, tuple[str, dict[str, Any]]] = {}
    for path, entry in entries:
        known(entry, _COLUMN_KEYS, path)
        if ("name" in entry) == ("match" in entry):
            raise SpecError(f"{path}: give either name or match")
        if "name" in entry:
            name = value(entry, "name", str, "", path)
            if name in exact:
                raise SpecError(f"{path}.name = {name!r}: {exact[name][0]} has this name already")
            exact[name] = (path, entry)
            continue
        pattern = value(entry, "match", str, "", path)
        matched = [n for n in kinds if fnmatch.fnmatchcase(n, pattern)]
        if not matched:
            raise SpecError(
                f"{path}.match = {pattern!r}: matches no input column{nearest(pattern, kinds)}"
            )
        for name in matched:
            if name in wild:
                raise SpecError(
                    f"{path}.match = {pattern!r}: {wild[name][0]} matches {name!r} too; "
                    "give that column a [[column]] with its name"
                )
            wild[name] = (path, entry)
    chosen = {**wild, **exact}
    names = [n for n in kinds if n in chosen] + [n for n in exact if n not in kinds]
    columns = [
        c
        for name in names
        for c in _expanded(_column(name, *chosen[name], kinds), chosen[name][0], kinds)
    ]
    for number, column in enumerate(columns):
        if "\0" in column.name:
            raise SpecError(
                f"column {column.name!r}: a file cannot hold a name with the character 0; leave it out"
            )
        alike = next(
            (other.name for other in columns[:number] if other.name.lower() == column.name.lower()),
            None,
        )
        if alike == column.name:
            raise SpecError(
                f"column {column.name!r} is there twice: an operator adds one of this name"
            )
        if alike is not None:
            raise SpecError(
                f"column {column.name!r}: a Delta table cannot tell it from {alike!r}; give one of them "
                "another name, not one with other capitals"
            )
    _joint(columns)
    return tuple(columns)


def is_the_tables_own(name: str) -> bool:
    """Whether no column of a spec can have this name."""
    return name.lower() in ("split", "partition") or name.startswith("_")


def _expanded(column: ColumnSpec, path: str, kinds: Mapping[str, str]) -> list[ColumnSpec]:
    """The columns that one entry stands for: one_hot makes a column for each value, a fill's indicator one more."""
    marked = [number for number, op in enumerate(column.ops) if getattr(op, "indicator", False)]
    if marked:
        plain = tuple(
            dataclasses.replace(op, indicator=False) if isinstance(op, _FILLS) else op
            for op in column.ops
        )
        return [dataclasses.replace(column, ops=plain), _indicator(column, marked[0], path, kinds)]
    if column.ops and isinstance(last := column.ops[-1], OneHot) and column.role != "label":
        return [
            dataclasses.replace(
                column, name=f"{column.name}={one}", ops=(*column.ops[:-1], OneHot(values=(one,)))
            )
            for one in last.values
        ]
    return [column]


def _indicator(column: ColumnSpec, number: int, path: str, kinds: Mapping[str, str]) -> ColumnSpec:
    """The column that says where the fill of that number found no finite number; behind an operator that learns, where
    the input has none."""
    here = f"{path}.ops[{number}].indicator"
    if column.role == "label":
        raise SpecError(f"{here}: a label cannot make another column")
    before = column.ops[:number]
    if any(isinstance(op, Fitted) for op in before):
        before = ()
    kind: str | None = kinds[column.sources[0]] if len(column.sources) == 1 else "row"
    for op in before:
        kind = follow(op, kind or "")
    if kind != "number":
        raise SpecError(
            f"{here}: the added column is made of {kind} here, not of a number; leave indicator out, and "
            'make a column of its own with {op = "missing"}'
        )
    return ColumnSpec(
        name=f"{column.name}_missing",
        sources=column.sources,
        role="dense",
        ops=(*before, Missing()),
    )


def _joint(columns: list[ColumnSpec]) -> None:
    """Checks that columns which share a vocabulary agree on its parameters."""
    first: dict[str, tuple[str, Operator]] = {}
    for column in columns:
        for key, op, number in column.fitted:
            if key.startswith("joint/"):
                if column.level(number):
                    raise SpecError(
                        f"column {column.name!r}: a joint vocabulary must be the first that learns"
                    )
                name, other = first.setdefault(key, (column.name, op))
                if other != op:
                    raise SpecError(
                        f"column {column.name!r}: joint = {key[6:]!r} has other parameters in column "
                        f"{name!r}; they share one vocabulary"
                    )


def _column(name: str, path: str, raw: dict[str, Any], kinds: Mapping[str, str]) -> ColumnSpec:
    if is_the_tables_own(name):
        raise SpecError(f"{path}.name = {name!r}: this name is the table's own")
    sources = texts(raw, "from", (name,), path)
    for source in sources:
        if source not in kinds:
            key = "from" if "from" in raw else "name"
            raise SpecError(
                f"{path}.{key} = {source!r}: no such input column{nearest(source, kinds)}"
            )
    if not sources:
        raise SpecError(f"{path}.from: must name at least one input column")
    role = value(raw, "role", str, "", path)
    if role not in ROLE_KINDS:
        raise SpecError(f"{path}.role = {role!r}: unknown role{nearest(role, ROLE_KINDS)}")
    kind = kinds[sources[0]] if len(sources) == 1 else "row"
    ops = []
    online = None
    kinds_there: list[str] = []
    for number, entry in enumerate(value(raw, "ops", list, [], path)):
        here = f"{path}.ops[{number}]"
        op, is_online = operator(entry, here)
        if kind == "row" and isinstance(op, Python) and len(op.inputs) != len(sources):
            raise SpecError(
                f"{here}.inputs: names {len(op.inputs)} inputs, but the column is made from {len(sources)}"
            )
        given = follow(op, kind)
        if given is None:
            what = f"several columns ({', '.join(sources)})" if kind == "row" else kind
            raise SpecError(
                f"{here}: {op.name} takes {' or '.join(op.takes)}, but column {name!r} is {what} here"
            )
        if op.columns and (found := tuple(kinds[source] for source in sources)) != op.columns:
            raise SpecError(
                f"{here}: {op.name} takes columns of {' and '.join(op.columns)}, and {', '.join(sources)} "
                f"are {' and '.join(found)}"
            )
        if is_online:
            may_be_left(op, role, kind, sources, f"{here}.online")
            online = number if online is None else online
        elif online is not None:
            raise SpecError(
                f"{here}.online: {path}.ops[{online}] is left to the loader, so all after it must be too"
            )
        ops.append(op)
        kinds_there.append(kind)
        kind = given
    stored_as, as_is = (
        ("", False) if online is None else left_as(role, kinds_there[online], ops, online)
    )
    fits_its_role(name, role, kind, ops if as_is else ops[:online], path)
    if sum(isinstance(op, Fitted) for op in ops) > MAX_LEVELS:
        raise SpecError(
            f"{path}.ops: at most {MAX_LEVELS} operators that learn can follow each other in a chain"
        )
    return ColumnSpec(
        name=name,
        sources=sources,
        role=role,
        ops=tuple(ops),
        online=online,
        left_as=stored_as,
        raw=as_is,
        width=_width(raw, role, path),
    )


def may_be_left(op: Operator, role: str, kind: str, sources: tuple[str, ...], here: str) -> None:
    """Refuses an operator that only the ETL can apply; `here` is the key that leaves it to the loader."""
    if role not in ("dense", "sparse", "id_list"):
        raise SpecError(
            f"{here}: a {role} column cannot be left to the loader; dense, sparse and id_list ones "
            "can"
        )
    if kind == "row":
        raise SpecError(
            f"{here}: {op.name} takes several columns ({', '.join(sources)}), and one is stored; "
            "apply it in the ETL, or as a [[transform]] over columns that are"
        )
    if isinstance(op, Python):
        raise SpecError(
            f"{here}: python cannot be left to the loader; name {op.function!r} as the function of "
            "a [[transform]]"
        )
    if op.needs:
        raise SpecError(
            f"{here}: {op.name} must know a row's {' and '.join(op.needs)}, which the ETL alone "
            "does"
        )


def left_as(role: str, kind: str, ops: Sequence[Operator], online: int) -> tuple[str, bool]:
    """The type in which a column of that kind is stored for its operators from `online` on, and whether nulls stay."""
    if role == "sparse" and all(op.online_too for op in ops[online:]):
        return ops[online].left_as, False
    number = follow(ops[online], kind) is not None and "number" in ops[online].takes
    if kind in LISTS.values():
        return ("list<double>" if kind == "numbers" else "list<string>"), True
    return ("double" if kind == "number" and number else "string"), True


def _filled(ops: Sequence[Operator]) -> bool:
    return any(isinstance(op, (*_FILLS, Missing, OneHot)) or not op.may_be_null for op in ops)


def fits_its_role(
    name: str, role: str, kind: str, until_stored: Sequence[Operator], path: str
) -> None:
    """Refuses a chain that ends in another kind than its role needs, or leaves nulls where none can be stored."""
    wanted = ROLE_KINDS[role][0]
    if kind != wanted:
        hint = {
            "id": "add categorify or hash",
            "ids": "add split and categorify or hash",
            "text": "leave them out",
        }.get(wanted, "add an operator that gives numbers")
        raise SpecError(
            f"{path}: column {name!r} has role {role!r}, which needs {wanted}, but its operators end in "
            f"{kind}; {hint}"
        )
    if role in ("dense", "weight") and not _filled(until_stored):
        raise SpecError(
            f"{path}: column {name!r} may have nulls, which a {role} column cannot store; add "
            '{op = "fill"}'
        )


def _width(raw: dict[str, Any], role: str, path: str) -> int | None:
    if "embedding" not in raw:
        return None
    if role not in ("sparse", "id_list"):
        raise SpecError(f"{path}.embedding: a {role} column has none")
    embedding = value(raw, "embedding", dict, {}, path)
    known(embedding, ("width",), f"{path}.embedding")
    width = value(embedding, "width", int, 0, f"{path}.embedding")
    if not 1 <= width <= MAX_WIDTH:
        raise SpecError(f"{path}.embedding.width = {width}: must be from 1 to {MAX_WIDTH}")
    return int(width)


def operator(raw: Any, path: str) -> tuple[Operator, bool]:
    """The operator that an entry of a chain names, and whether it is left to the loader."""
    if not isinstance(raw, dict) or "op" not in raw:
        raise SpecError(f'{path} = {raw!r}: write {{op = "name", …}}')
    if raw["op"] not in OPERATORS:
        raise SpecError(
            f"{path}.op = {raw['op']!r}: unknown operator{nearest(str(raw['op']), OPERATORS)}"
        )
    kind = OPERATORS[raw["op"]]
    parameters = {f.name: f for f in dataclasses.fields(kind)}
    known({k: v for k, v in raw.items() if k not in ("op", "online")}, parameters, path)
    hints = _hints(kind)
    given: dict[str, Any] = {}
    for key, parameter in parameters.items():
        if key in raw:
            given[key] = _parameter(raw, key, str(hints[key]), path)
        elif parameter.default is dataclasses.MISSING:
            raise SpecError(f"{path}: {kind.name} needs {key}")
    try:
        return kind(**given), bool(value(raw, "online", bool, False, path))
    except OperatorError as error:
        raise SpecError(f"{path}.{error}") from None


@cache
def _hints(kind: type[Operator]) -> dict[str, Any]:
    return get_type_hints(kind)


def _parameter(raw: Mapping[str, Any], key: str, hint: str, path: str) -> Any:
    if hint == "str | tuple[str, ...]":
        found = texts(raw, key, (), path)
        return found[0] if isinstance(raw[key], str) else found
    if hint.startswith("tuple[str"):
        return texts(raw, key, (), path)
    if hint.startswith("tuple[float"):
        found = value(raw, key, list, [], path)
        if any(isinstance(item, bool) or not isinstance(item, (int, float)) for item in found):
            raise SpecError(f"{path}.{key} = {found!r}: must be numbers")
        return tuple(float(item) for item in found)
    if "float" in hint:
        return float(value(raw, key, (int, float), None, path))
    return value(
        raw, key, {"<class 'str'>": str, "<class 'bool'>": bool}.get(hint, int), None, path
    )
