"""The [[column]] entries of a spec: `ColumnSpec`, one column of the table and how it is made."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from sluice.common.errors import OperatorError
from sluice.common.suggest import nearest, nearest_or_way
from sluice.etl.ops import OPERATORS
from sluice.etl.ops.base import LISTS, Fitted, Operator, between, is_wide
from sluice.etl.ops.chain import follow
from sluice.etl.ops.lists import FirstX
from sluice.etl.ops.numeric import Missing, OneHot
from sluice.etl.ops.user_function import Python
from sluice.etl.spec.toml_keys import Columns, SpecError, check_keys, read_into, read_value

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
MODEL_ROLES = ("dense", "sparse", "id_list")
"""The roles of a model's inputs."""
Role = Literal["label", "weight", "dense", "sparse", "id_list", "time", "key"]
MAX_LEVELS = 3
_COLUMN_KEYS = ("name", "match", "from", "role", "ops", "embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The `embedding` of a column."""

    width: Annotated[int, between(1, 4096)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """One column of the table."""

    name: str
    sources: tuple[str, ...]
    """The input columns that it is made from."""
    role: str
    ops: tuple[Operator, ...] = ()
    online: int | None = None
    """The number of the first operator that is left to the loader. None: the ETL applies all."""
    left_as: str = ""
    """Arrow's name of the type in which such a column is stored."""
    raw: bool = False
    """Whether such a column is stored as texts, numbers or lists in which nulls stay nulls."""
    width: int | None = None

    def state_key(self, number: int) -> str:
        """Returns the key of the fitted state of this column's operator with this number."""
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
        """Arrow's name of the stored type. For bags it is the type in which they are packed."""
        return self.left_as or (
            "int64" if self.role == "sparse" and self.wide else ROLE_KINDS[self.role][1]
        )

    @property
    def left_to_loader(self) -> tuple[dict[str, Any], ...]:
        """The online operators as `Field.online` holds them: plain values, with the key of each state."""
        if self.online is None:
            return ()
        return tuple(
            {
                # Release 0.2 wrote these keys, and fingerprints have them.
                **({"past": False, "past_step": 0.0} if op.name == "count" else {}),
                **{k: list(v) if isinstance(v, tuple) else v for k, v in op.described.items()},
                **({"state": self.state_key(number)} if isinstance(op, Fitted) else {}),
            }
            for number, op in enumerate(self.ops)
            if number >= self.online
        )

    def level(self, number: int) -> int:
        """Returns the fitting pass of an operator: the number of operators before it that learn."""
        return sum(isinstance(op, Fitted) for op in self.ops[:number])


def read_columns(
    entries: list[tuple[str, dict[str, Any]]], kinds: Mapping[str, str]
) -> tuple[ColumnSpec, ...]:
    """Reads all columns. The columns of a wildcard come in the order of `kinds`, the input columns. An entry with a
    column's exact name takes precedence over a wildcard."""
    exact: dict[str, tuple[str, dict[str, Any]]] = {}
    wild: dict[str, tuple[str, dict[str, Any]]] = {}
    for path, entry in entries:
        check_keys(entry, _COLUMN_KEYS, path)
        if ("name" in entry) == ("match" in entry):
            raise SpecError(f"{path}: give either name or match")
        if "name" in entry:
            name = read_value(entry["name"], str, f"{path}.name")
            if name in exact:
                raise SpecError(f"{path}.name = {name!r}: {exact[name][0]} has this name already")
            exact[name] = (path, entry)
            continue
        pattern = read_value(entry["match"], str, f"{path}.match")
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
    columns = []
    for name in names:
        path, entry = chosen[name]
        columns += _split_column(_read_column(name, path, entry, kinds), path, kinds)
    _check_names(columns)
    _check_joint_vocabularies(columns)
    return tuple(columns)


def _check_names(columns: list[ColumnSpec]) -> None:
    """Refuses names that a file or a Delta table cannot hold."""
    seen: dict[str, ColumnSpec] = {}
    for column in columns:
        name = column.name
        if "\0" in name:
            raise SpecError(
                f"column {name!r}: a file cannot hold a name with the character 0; leave it out"
            )
        other = seen.setdefault(name.lower(), column)
        if other is not column:
            raise SpecError(
                f"column {name!r} is there twice: an operator adds one of this name"
                if other.name == name
                else f"column {name!r}: a Delta table cannot tell it from {other.name!r}; give one of them "
                "another name, not one with other capitals"
            )


def is_reserved_name(name: str) -> bool:
    """Returns whether a name is reserved, so that no column of a spec can have it."""
    return name.lower() in ("split", "partition") or name.startswith("_")


def free_name(name: str, existing: Container[str], used: Iterable[str], taken: set[str]) -> str:
    """Returns the name of a column in the table, and adds it to `taken` if it is new. Two names of a table must differ
    in more than case."""
    first = next(other for other in used if other.lower() == name.lower())
    # A model names its embedding tables by the columns, and PyTorch allows no dots there.
    plain = name.replace(".", "_")
    chosen = name if plain in existing else plain
    if name == first and not is_reserved_name(chosen):
        return chosen
    chosen = chosen.strip("_") or "column"
    numbered = (f"{chosen}_{number}" for number in itertools.count(2))
    chosen = next(candidate for candidate in numbered if candidate.lower() not in taken)
    taken.add(chosen.lower())
    return chosen


def _split_column(column: ColumnSpec, path: str, kinds: Mapping[str, str]) -> list[ColumnSpec]:
    """Returns the columns of one entry: one_hot makes a column for each value, and a fill's indicator adds one."""
    marked = [number for number, op in enumerate(column.ops) if getattr(op, "indicator", False)]
    if marked:
        plain = tuple(
            dataclasses.replace(op, **{"indicator": False} if number in marked else {})
            for number, op in enumerate(column.ops)
        )
        return [dataclasses.replace(column, ops=plain), _indicator(column, marked[0], path, kinds)]
    if column.ops and isinstance(last := column.ops[-1], OneHot) and column.role != "label":
        return [
            dataclasses.replace(
                column,
                name=f"{column.name}={value}",
                ops=(*column.ops[:-1], OneHot(values=(value,))),
            )
            for value in last.values
        ]
    return [column]


def _indicator(column: ColumnSpec, number: int, path: str, kinds: Mapping[str, str]) -> ColumnSpec:
    """Returns the column that marks rows in which the fill of that number found no finite number. If an operator before
    the fill learns, it marks rows in which the input has none."""
    here = f"{path}.ops[{number}].indicator"
    if column.role == "label":
        raise SpecError(f"{here}: a label cannot make another column")
    before = column.ops[:number]
    if any(isinstance(op, Fitted) for op in before):
        before = ()
    kind = _kinds_along(column.sources, before, kinds)[-1]
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


def _check_joint_vocabularies(columns: list[ColumnSpec]) -> None:
    """Refuses columns that share a vocabulary and differ in its parameters."""
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


def _read_column(name: str, path: str, raw: dict[str, Any], kinds: Mapping[str, str]) -> ColumnSpec:
    if is_reserved_name(name):
        raise SpecError(f"{path}.name = {name!r}: this name is the table's own")
    key = "from" if "from" in raw else "name"
    sources = read_value({"name": name, **raw}[key], Columns, f"{path}.{key}", kinds)
    if not sources:
        raise SpecError(f"{path}.from: must name at least one input column")
    role, width = read_value(raw.get("role", ""), Role, f"{path}.role"), None
    if "embedding" in raw:
        if role not in ("sparse", "id_list"):
            raise SpecError(f"{path}.embedding: a {role} column has none")
        width = read_into(Embedding, raw["embedding"], f"{path}.embedding").width
    column = ColumnSpec(name=name, sources=sources, role=role, width=width)
    kind = _kinds_along(sources, (), kinds)[0]
    online = None
    for number, entry in enumerate(read_value(raw.get("ops", []), list, f"{path}.ops")):
        here = f"{path}.ops[{number}]"
        op, is_online = read_operator(entry, here)
        kind = _follow(op, kind, column, kinds, here)
        if is_online and online is None:
            online = number
        elif online is not None and not is_online:
            raise SpecError(
                f"{here}.online: {path}.ops[{online}] is left to the loader, so all after it must be too"
            )
        column = dataclasses.replace(column, ops=(*column.ops, op))
    if len(column.fitted) > MAX_LEVELS:
        raise SpecError(
            f"{path}.ops: at most {MAX_LEVELS} operators that learn can follow each other in a chain"
        )
    return leave_to_loader(column, online, kinds, path)


def _kinds_along(
    sources: tuple[str, ...], ops: Sequence[Operator], kinds: Mapping[str, str]
) -> list[str]:
    """Returns the kind of values before each operator, and after the last."""
    kinds_along = [kinds[sources[0]] if len(sources) == 1 else "row"]
    for op in ops:
        kinds_along.append(follow(op, kinds_along[-1]) or "")
    return kinds_along


def _follow(
    op: Operator, kind: str, column: ColumnSpec, kinds: Mapping[str, str], here: str
) -> str:
    """Returns the kind that an operator gives. Raises SpecError if it cannot take the column as it is there."""
    if kind == "row" and isinstance(op, Python) and len(op.inputs) != len(column.sources):
        raise SpecError(
            f"{here}.inputs: names {len(op.inputs)} inputs, but the column is made from "
            f"{len(column.sources)}"
        )
    given = follow(op, kind)
    if given is None:
        what = f"several columns ({', '.join(column.sources)})" if kind == "row" else kind
        raise SpecError(
            f"{here}: {op.name} takes {' or '.join(op.takes)}, but column {column.name!r} is {what} here"
        )
    return given


def leave_to_loader(
    column: ColumnSpec, number: int | None, kinds: Mapping[str, str], path: str
) -> ColumnSpec:
    """Leaves a column's operators from that number on to the loader, or none. Raises SpecError if the loader cannot
    apply them, or if what is then stored does not fit the column's role."""
    along = _kinds_along(column.sources, column.ops, kinds)
    stored_as = ""
    raw = False
    if number is not None:
        for op, kind in zip(column.ops[number:], along[number:], strict=False):
            _check_leavable(op, column, kind, path)
        kind, left = along[number], column.ops[number:]
        raw = column.role != "sparse" or not all(op.online_too for op in left)
        if not raw:
            stored_as = left[0].left_as
        elif kind in LISTS.values():
            stored_as = "list<double>" if kind == "numbers" else "list<string>"
        else:
            stored_as = "double" if kind == "number" and "number" in left[0].takes else "string"
    _check_role(column, along[-1], column.ops if raw else column.ops[:number], path)
    return dataclasses.replace(column, online=number, left_as=stored_as, raw=raw)


def _check_leavable(op: Operator, column: ColumnSpec, kind: str, path: str) -> None:
    """Refuses an operator that only the ETL can apply."""
    if column.role not in MODEL_ROLES:
        raise SpecError(
            f"{path}: a {column.role} column cannot be left to the loader; dense, sparse and id_list "
            "columns can"
        )
    if kind == "row":
        raise SpecError(
            f"{path}: {op.name} takes several columns ({', '.join(column.sources)}), so it cannot be left "
            "to the loader; apply it in the ETL, or as a [[transform]] over columns of the table"
        )
    if isinstance(op, Python):
        raise SpecError(
            f"{path}: python cannot be left to the loader; name {op.function!r} as the function of "
            "a [[transform]]"
        )
    if op.needs:
        raise SpecError(
            f"{path}: {op.name} must know a row's {' and '.join(op.needs)}, which only the ETL knows"
        )


def takes_texts(ops: Sequence[Operator]) -> bool:
    """Returns whether operators make texts of numbers, before any of them computes with the numbers."""
    op = next((op for op in ops if not isinstance(op, FirstX)), None)
    return (
        op is not None and op.takes[0] not in ("number", "numbers") and not isinstance(op, Python)
    )


def _check_role(column: ColumnSpec, kind: str, until_stored: Sequence[Operator], path: str) -> None:
    """Refuses a chain that ends in another kind than its role needs, or leaves nulls that cannot be stored."""
    wanted = ROLE_KINDS[column.role][0]
    if kind != wanted:
        hint = {
            "id": "add categorify or hash",
            "ids": "add split and categorify or hash",
            "text": "leave them out, and read it as text",
        }.get(wanted, "add an operator that gives numbers")
        raise SpecError(
            f"{path}: column {column.name!r} has role {column.role!r}, which needs {wanted}, but its "
            f"operators end in {kind}; {hint}"
        )
    may_be_null = all(op.may_be_null for op in until_stored)
    if column.role in ("dense", "weight") and may_be_null:
        raise SpecError(
            f"{path}: column {column.name!r} may have nulls, which a {column.role} column cannot store; "
            'add {op = "fill"}'
        )


def read_operator(raw: Any, path: str) -> tuple[Operator, bool]:
    """Returns the operator that an entry of a chain names, and whether it is left to the loader."""
    if not isinstance(raw, dict) or "op" not in raw:
        raise SpecError(f'{path} = {raw!r}: write {{op = "name", …}}')
    name = str(raw["op"])
    parameters = {key: value for key, value in raw.items() if key not in ("op", "online")}
    if name not in OPERATORS:
        raise SpecError(f"{path}.op = {name!r}: unknown operator{nearest_or_way(name, OPERATORS)}")
    try:
        op = read_into(OPERATORS[name], parameters, path)
    except OperatorError as error:
        raise SpecError(f"{path}.{error}") from None
    return op, read_value(raw.get("online", False), bool, f"{path}.online")
