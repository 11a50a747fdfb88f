"""Turns a caller's roles for the columns of plain Parquet, given by names and patterns, into recipes: `recipes_of`. A
spec's columns become recipes by `recipes_of_spec`, which rejects what only a job can do."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from sluice.common.errors import OperatorError, UsageError
from sluice.common.number_checks import is_whole
from sluice.etl.ops import Fitted, Operator
from sluice.etl.ops.base import FIRST, MAX_ID
from sluice.etl.ops.numeric import COMPARISONS, Compare, OneHot
from sluice.etl.ops.user_function import Python
from sluice.etl.spec.nested_columns import is_bytes, is_list, is_text
from sluice.etl.spec.spec import Spec
from sluice.ingest.columns import ColumnError
from sluice.ingest.knobs import nearest
from sluice.ingest.plain.recipe import Recipe

ROLES = ("label", "weight", "dense", "sparse", "id_list")
Roles = Mapping[str, str | Sequence[str]]
"""Maps a role to the names, or patterns of names, of its columns: `{"label": "click", "dense": "I*", "sparse":
["C*", "user%1000000"]}`. The number after a percent sign is the number of ids to hash to. A label may be a comparison:
`stars >= 4`, `event == buy`."""
Types = Mapping[str, pa.DataType]
"""The type of each column of a file."""
_MOST_IDS = MAX_ID - FIRST
_SIZED = re.compile(r"(.+)%(\d[\d_]*)")
_JOB = "make a table of it by `sluice etl --spec`, and load that"
_COMPARED = re.compile(rf"(.+?)\s*({'|'.join(COMPARISONS)})\s*(\S.*)")


class ParquetError(UsageError):
    """Files cannot be loaded. The message names the file or the column, and says what to do."""


class GuessError(ParquetError):
    """The label of the files cannot be guessed."""


def can_hash(kind: pa.DataType) -> bool:
    """Whether values of this type can be hashed: whole numbers, texts, and lists of these."""
    kind = kind.value_type if is_list(kind) else kind
    checks = is_text, pa.types.is_integer, is_bytes
    return any(check(kind) for check in checks)


def roles_of(text: str) -> dict[str, list[str]]:
    """Parses `label=click;dense=I*,age;sparse=user%1000000` into the names or patterns of each role."""
    roles: dict[str, list[str]] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        role, sign, names = part.partition("=")
        if not sign:
            raise ParquetError(
                f"roles: {part!r} has no '='; write for instance label=click;dense=I*"
            )
        if role.strip() in roles:
            raise ParquetError(
                f"roles: {role.strip()!r} is given twice; write it once, with all its columns separated by "
                "commas"
            )
        roles[role.strip()] = [name.strip() for name in names.split(",") if name.strip()]
    return roles


def _several(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def only_label(roles: Roles) -> str | None:
    """Returns the label, if the roles name nothing else."""
    labels = _several(roles.get("label", ()))
    return labels[0] if len(roles) == len(labels) == 1 else None


def label_of(text: str, types: Types) -> tuple[str, tuple[Operator, ...]]:
    """Returns the label's column, and the operators that make the label from it. `stars >= 4` compares numbers,
    `event == buy` compares texts. A column that is not in `types` gets no operators: callers refuse its name."""
    if text in types or not (match := _COMPARED.fullmatch(text)):
        return text, ()
    name, sign, right = match.groups()
    if name not in types:
        return name, ()
    if is_text(types[name]):
        if sign != "==":
            raise ParquetError(
                f"label {text!r}: column {name!r} holds {types[name]}, which can only be compared by =="
            )
        return name, (OneHot(values=(right,)),)
    try:
        return name, (Compare(to=f"{sign} {right}"),)
    except OperatorError as error:
        raise ParquetError(f"label {text!r}: {error}") from None


def recipes_of(
    roles: Roles, hashed: Mapping[str, int], types: Types, lacking: Mapping[str, str]
) -> tuple[tuple[Recipe, ...], dict[str, int]]:
    """Returns the recipes of the columns, and the number of ids of each hashed column. Columns are in the caller's
    order. The columns of one pattern are in the files' order. `types` has the types of the columns that all files have.
    `lacking` has for each other column a file that lacks it."""
    sizes: dict[str, int] = {}
    for pattern, ids in hashed.items():
        for name in _names(pattern, "hash", types, lacking):
            _check_hash(name, ids, types)
            sizes[name] = ids
    labels = dict(label_of(text, types) for text in _several(roles.get("label", ())))
    asked = list(_asked({**roles, "label": list(labels)} if labels else roles, types, lacking))
    exact: dict[str, str] = {}
    for role, pattern, names, _ in asked:
        if names == [pattern]:
            if pattern in exact:
                raise ParquetError(
                    f"roles: column {pattern!r} is asked for as {exact[pattern]} and as {role}; name it once"
                )
            exact[pattern] = role
    role_of: dict[str, str] = {}
    for role, pattern, names, size in asked:
        for name in names:
            if name in exact and pattern != name:
                continue  # an exact name beats a pattern
            if role_of.setdefault(name, role) != role:
                raise ParquetError(
                    f"roles: column {name!r} is asked for as {role_of[name]} and as {role}"
                )
            if size is not None and sizes.setdefault(name, size) != size:
                raise ParquetError(
                    f"roles: column {name!r} gets {size:,} ids by its role, but {sizes[name]:,} by hash"
                )
    for name in sizes:
        role = role_of.setdefault(name, "sparse")
        if role not in ("sparse", "id_list"):
            raise ParquetError(f"hash: column {name!r} is asked for as {role}; only ids are hashed")
    return tuple(
        Recipe.stored(
            name,
            "id_list" if role == "sparse" and is_list(types[name]) else role,
            types[name],
            sizes.get(name),
            labels.get(name, ()) if role == "label" else (),
        )
        for name, role in role_of.items()
    ), sizes


def _asked(
    roles: Roles, types: Types, lacking: Mapping[str, str]
) -> Iterator[tuple[str, str, list[str], int | None]]:
    """Yields each role with a name or pattern, the columns that match it, and the number of ids to hash them to."""
    for role, wanted in roles.items():
        if role not in ROLES:
            raise ParquetError(f"roles: {role!r} is not a role{nearest(role, ROLES)}")
        for text in _several(wanted):
            pattern, size = text, None
            if text not in types and (match := _SIZED.fullmatch(text)):
                pattern, size = match[1], int(match[2])
            names = _names(pattern, "roles", types, lacking)
            for name in names if size is not None else ():
                _check_hash(name, size, types)
            yield role, pattern, names, size


def _check_hash(name: str, size: int | None, types: Types) -> None:
    if not is_whole(size, 1, _MOST_IDS):
        raise ParquetError(
            f"hash: {size!r} for column {name!r} is not a number of ids from 1 to {_MOST_IDS:,}"
        )
    if not can_hash(types[name]):
        raise ParquetError(
            f"hash: column {name!r} holds {types[name]}; only whole numbers, texts and lists of these "
            "can be hashed"
        )


def _names(pattern: str, where: str, types: Types, lacking: Mapping[str, str]) -> list[str]:
    """Returns the columns that match a name or a pattern."""
    if pattern in lacking:
        raise ParquetError(
            f"{lacking[pattern]}: no column {pattern!r}, which other files have; a spec can say that "
            "files may lack it (input.optional; `sluice guess` writes one)"
        )
    names = [pattern] if pattern in types else fnmatch.filter(types, pattern)
    if not names:
        raise ParquetError(f"{where}: there is no column {pattern!r}{nearest(pattern, types)}")
    return names


def recipes_of_spec(
    spec: Spec, types: Types, lacking: Mapping[str, str], form: str
) -> tuple[Recipe, ...]:
    """Returns the recipes of the model's columns, in the spec's order. `types` has the types of the files' columns.
    Files may lack optional columns. `form` is the format of the source."""
    _refuse_rules_of_jobs(spec, form)
    for name in spec.input.columns:
        if name not in types and name not in spec.input.optional:
            where = (
                f"{lacking[name]}: no column {name!r}, which other files have"
                if name in lacking
                else f"the files have no column {name!r}, which its input.columns name{nearest(name, types)}"
            )
            raise ColumnError(
                f"{spec.name}: {where}; if it may be missing, add it to input.optional as well"
            )
    recipes = []
    for column in spec.columns:
        if column.role not in ROLES:
            continue
        for op in column.ops:
            if isinstance(op, Fitted):
                raise ColumnError(
                    f"{spec.name}: column {column.name!r}: {op.name} learns from the data, which a "
                    f"loader of plain files does not; use hash, modulus or bucketize, or {_JOB}"
                )
            if isinstance(op, Python):
                raise ColumnError(
                    f"{spec.name}: column {column.name!r}: python is for jobs; name {op.function!r} as "
                    "the function of a [[transform]]"
                )
        recipes.append(
            Recipe(
                name=column.name,
                role=column.role,
                sources=column.sources,
                operators=column.ops,
                kinds=tuple(spec.input.columns[name] for name in column.sources),
            )
        )
    return tuple(recipes)


def _refuse_rules_of_jobs(spec: Spec, form: str) -> None:
    source, rows = spec.input, spec.rows
    rules = {
        "[dedup]": rows.dedup,
        "[[join]]": rows.joins,
        "[[history]] or [[lag]]": rows.histories,
        "[[filter]]": rows.filters,
        "[sample]": rows.sample,
        "[negatives]": rows.negatives,
    }
    if source.format not in ("parquet", form):
        why = f"input.format is {source.format!r}, and this loader reads {form}"
    elif source.times or source.place:
        what = "a format of input.columns" if source.times else "input.place"
        why = f"{what} is for jobs"
    elif source.also and (form != "parquet" or any("." in name for name in source.column_of)):
        why = "also of a table's columns, or of parts of structs, is for jobs"
    elif rule := next(filter(rules.get, rules), None):
        why = f"{rule} changes which rows there are, which only a job can do"
    else:
        return
    raise ColumnError(f"{spec.name}: {why}; {_JOB}")
