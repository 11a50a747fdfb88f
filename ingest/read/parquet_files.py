"""Any Parquet files as a loader's source: `ParquetFiles`, a folder, a glob or a list of them, with a role for each
column. What the footers say is remembered beside the files."""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from sluice.etl.common.errors import UsageError
from sluice.etl.common.slow_path import plain_path, slow_path
from sluice.etl.schema import DataFile, Field, Fingerprint
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.etl.spec.table_transform import TableTransform, stored, transformed
from sluice.ingest.knobs import nearest
from sluice.ingest.read.footers import SEVERAL, Footer, FooterError, footers_of
from sluice.ingest.read.hashed_ids import MOST_IDS, can_hash, cardinality
from sluice.ingest.read.petastorm.options import retyped

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

ONLY_SPLIT = "train"
ROLES = ("label", "weight", "dense", "sparse", "id_list")
_LABELS = ("label", "target", "click", "clicked", "y", "is_click", "conversion")
_WEIGHTS = ("weight", "sample_weight")

_TIMES = re.compile(r"(^|_)(ts|time|timestamp|datetime|unixtime|epoch)(_?(ms|us|ns|s|utc))?$|_at$", re.IGNORECASE)
_TEXTS = ("string", "large_string", "binary", "large_binary")

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Roles = Mapping[str, str | Sequence[str]]
"""Maps a role to the names, or patterns of names, of its columns: `{"label": "click", "dense": "I*", "sparse":
["C*"]}`."""


class ParquetError(UsageError):
    """Files that cannot be loaded together: the message names the file or the column, and what to do."""


@dataclass(frozen=True)
class ParquetFiles:
    """Some Parquet files of one schema. A loader takes them in place of a feature table; all files are one split."""

    uri: str
    fields: tuple[Field, ...]
    files: tuple[DataFile, ...]
    bags: Mapping[str, float]
    """The average number of ids of a row in each column of bags."""
    hash: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The columns whose ids are made by hashing what is stored, and over how many ids (`HashedIds`)."""
    transforms: tuple[TableTransform, ...] = ()
    """What the loader does to the columns."""
    permission: Permission = NOTHING
    """Which of the functions that these name may be imported."""
    spec: Any = None
    """The TransformSpec that each row group goes through: `fields` are the columns after it."""

    @classmethod
    def open(cls, source: Paths, roles: Roles | str | None = None, hash: Mapping[str, int] | None = None, *,
             permission: Permission = NOTHING, spec: Any = None) -> ParquetFiles:
        """Opens the files. Without `roles` they are guessed by name and type, and printed on standard error, once for a
        source. `hash` maps names, or patterns of names, to numbers of ids. Both are of the columns after `spec`."""
        uri, prefix, paths = _paths(source)
        try:
            footers = footers_of(paths)
        except FooterError as error:
            raise ParquetError(str(error)) from error
        types, lacking = _common_types(paths, footers)
        stored = types
        if spec is not None:
            types = retyped(types, pq.read_schema(paths[0]), spec)
        sizes = _sizes(hash or {}, types, lacking)
        if roles is None:
            roles = _guessed(uri, types, lacking, sizes, _times(stored, paths[0]))
        elif isinstance(roles, str):
            roles = roles_of(roles)
        fields = tuple(_fields(roles, types, lacking, sizes))
        edited = {field[0] for field in spec.edit_fields} if spec is not None else ()
        _check_types([f for f in fields if f.name not in edited], paths, footers)
        fields = tuple(_hashed(f, sizes[f.name]) if f.name in sizes else f for f in fields)
        files = tuple(DataFile(path=prefix + p, rows=sum(f.row_groups), bytes=f.bytes, row_group_rows=f.row_groups)
                      for p, f in zip(paths, footers, strict=True))
        rows = max(1, sum(f.rows for f in files))
        bags = [field.name for field in fields if field.role == "id_list" and field.name in footers[0].ids]
        return cls(uri, fields, files, {name: sum(f.ids[name] for f in footers) / rows for name in bags}, sizes,
                   permission=permission, spec=spec)

    @cached_property
    def version(self) -> str:
        """Hash of names, sizes and row groups: another version means other rows, or another order."""
        named = [[os.path.basename(f.path), f.bytes, f.row_group_rows] for f in self.files]
        text = json.dumps([named, self.hash] if self.hash else named)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def transformed(self, transforms: Iterable[TableTransform]) -> ParquetFiles:
        """The same files with these transforms on top. SpecError if one needs a column that is not there."""
        more = tuple(transforms)
        return replace(self, fields=transformed(self.fields, more), transforms=(*self.transforms, *more))

    @property
    def stored(self) -> tuple[Field, ...]:
        """The columns that files hold, as they hold them."""
        return stored(self.fields)

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.fields, [one.described for one in self.transforms])

    def state(self) -> None:
        """None: no operator has learned anything."""

    def files_of(self, split: str) -> tuple[DataFile, ...]:
        if split != ONLY_SPLIT:
            raise ParquetError(f"{self.uri}: no split {split!r}: plain Parquet files are one, {ONLY_SPLIT!r}; give the "
                               "loader the files of a part")
        return self.files


def roles_of(text: str) -> dict[str, list[str]]:
    """Parses `label=click;dense=I*,age` into the names or patterns of each role."""
    roles = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        role, sign, names = part.partition("=")
        if not sign:
            raise ParquetError(f"roles: {part!r} has no '='; write for instance label=click;dense=I*")
        roles[role.strip()] = [name.strip() for name in names.split(",") if name.strip()]
    return roles


_told: set[str] = set()


def _guessed(uri: str, types: Mapping[str, str], lacking: Mapping[str, str], sizes: Mapping[str, int],
             times: Iterable[str]) -> Roles:
    """Guesses the roles, and says once which, and what was left out and why."""
    roles = guess({name: kind for name, kind in types.items() if name not in times or name in sizes}, sizes)
    taken = "; ".join(f"{role}: {', '.join(names)}" for role, names in roles.items() if names)
    left = []
    for name in (*types, *lacking):
        if not any(name in names for names in roles.values()):
            why = "looks like a time" if name in times else "not in every file" if name in lacking else \
                "text, hash= makes ids of it" if types[name] in _TEXTS else types[name]
            left.append(f"{name} ({why})")
    line = f"{uri}: roles guessed ({taken}{'; left out: ' + ', '.join(left) if left else ''}); give roles= to choose"
    if line not in _told:
        _told.add(line)
        print(line, file=sys.stderr)
    return roles


def _times(types: Mapping[str, str], path: str) -> set[str]:
    """Columns of whole numbers that look like times: by their name, or because all that a file holds lies between the
    years 2001 and 2100, in seconds or a thousandth, millionth or billionth of one."""
    found = {name for name, kind in types.items() if kind in ("int64", "uint64", "int32", "uint32")
             and _TIMES.search(name)}
    whole = {name for name, kind in types.items() if kind in ("int64", "uint64", "int32", "uint32")}
    footer = pq.read_metadata(path)
    ranges: dict[str, list[tuple[int, int]]] = {}
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            known = column.statistics
            if column.path_in_schema in whole and known is not None and known.has_min_max:
                ranges.setdefault(column.path_in_schema, []).append((known.min, known.max))
    for name, seen in ranges.items():
        low, high = min(low for low, _ in seen), max(high for _, high in seen)
        if any(10**9 * unit <= low <= high <= 4102444800 * unit for unit in (1, 10**3, 10**6, 10**9)):
            found.add(name)
    return found


def guess(types: Mapping[str, str], sizes: Mapping[str, int] | None = None) -> dict[str, list[str]]:
    """Guesses roles by name and type: the label by its name, floats dense, whole numbers sparse, lists of them bags;
    what is hashed (`sizes`) sparse, or bags."""
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    by_name = {name.lower(): name for name in reversed(list(types))}
    label = next((by_name[n] for n in _LABELS if n in by_name), None)
    if label is None:
        raise ParquetError(f"no column is called {', '.join(_LABELS[:-1])} or {_LABELS[-1]}: say which is the label, "
                           f"roles={{'label': …}} (columns: {', '.join(list(types)[:20])})")
    for name, kind in types.items():
        if name == label:
            found["label"].append(name)
        elif name in (sizes or {}):
            found["id_list" if "list<" in kind else "sparse"].append(name)
        elif name.lower() in _WEIGHTS:
            found["weight"].append(name)
        elif kind in ("float", "double", "halffloat"):
            found["dense"].append(name)
        elif kind.startswith(("int", "uint")):
            found["sparse"].append(name)
        elif kind.startswith(("list<", "large_list<")) and "int" in kind:
            found["id_list"].append(name)
    return found


def _fields(roles: Roles, types: Mapping[str, str], lacking: Mapping[str, str], sizes: Mapping[str, int]
            ) -> Iterable[Field]:
    role_of: dict[str, str] = {}
    for role, wanted in roles.items():
        if role not in ROLES:
            raise ParquetError(f"roles: {role!r} is no role{nearest(role, ROLES)}")
        for pattern in [wanted] if isinstance(wanted, str) else wanted:
            if pattern in lacking:
                raise ParquetError(f"{lacking[pattern]}: no column {pattern!r}, which other files have")
            names = [pattern] if pattern in types else fnmatch.filter(types, pattern)
            if not names:
                raise ParquetError(f"roles: there is no column {pattern!r}{nearest(pattern, types)}")
            for name in names:
                if role_of.setdefault(name, role) != role:
                    raise ParquetError(f"roles: column {name!r} is asked for as {role_of[name]} and as {role}")
    for name in sizes:
        role = role_of.setdefault(name, "id_list" if "list<" in types[name] else "sparse")
        if role not in ("sparse", "id_list"):
            raise ParquetError(f"hash: column {name!r} is asked for as {role}; only ids are hashed")
    for name in types:
        if name in role_of:
            kind = types[name]
            layout = "scalar" if role_of[name] != "id_list" else "bytes" if "binary" in kind else "list"
            yield Field(name=name, role=role_of[name], type=kind, layout=layout)


# ---- hashed ids

def _sizes(wanted: Mapping[str, int], types: Mapping[str, str], lacking: Mapping[str, str]) -> dict[str, int]:
    """The number of ids of each column to be hashed."""
    found = {}
    for pattern, size in wanted.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_IDS:
            raise ParquetError(f"hash: {size!r} for column {pattern!r} is not a number of ids from 1 to {MOST_IDS:,}")
        if pattern in lacking:
            raise ParquetError(f"{lacking[pattern]}: no column {pattern!r}, which other files have")
        names = [pattern] if pattern in types else fnmatch.filter(types, pattern)
        if not names:
            raise ParquetError(f"hash: there is no column {pattern!r}{nearest(pattern, types)}")
        for name in names:
            if not can_hash(types[name]):
                raise ParquetError(f"hash: column {name!r} holds {types[name]}; whole numbers, texts and lists of them "
                                   "can be hashed")
            found[name] = size
    return found


def _hashed(column: Field, size: int) -> Field:
    """The column as it is once its values were hashed."""
    kind = "list<element: int32>" if column.role == "id_list" else "int32"
    return dataclasses.replace(column, type=kind, layout="list" if column.role == "id_list" else "scalar",
                   cardinality=cardinality(size))


# ---- files

def _paths(source: Paths) -> tuple[str, str, list[str]]:
    """The name of the source, what comes before each path to open it slowly, and the files' paths in the order of
    their names (a list keeps its own)."""
    if not isinstance(source, (str, os.PathLike)):
        slow = [(slow_path(os.fspath(p)), os.fspath(p)) for p in source]
        if not slow:
            raise ParquetError("an empty list of files")
        prefixes = {one.prefix if one else "" for one, _ in slow}
        if len(prefixes) > 1:
            raise ParquetError(f"files behind stores of several kinds ({', '.join(sorted(prefixes))}): give all "
                               "of them one delay, or none")
        return f"{len(slow)} files from {slow[0][1]}", prefixes.pop(), [one.path if one else p for one, p in slow]
    if (at := slow_path(os.fspath(source))) is not None:
        return os.fspath(source), at.prefix, _paths(at.path)[2]
    text = os.fspath(source)
    if os.path.isdir(text):
        if os.path.isdir(os.path.join(text, "_delta_log")):
            raise ParquetError(f"{text}: a Delta table, but none of ours; its folder may hold removed files, so give "
                               "the list of its version's files (deltalake.DeltaTable(…).file_uris())")
        paths = sorted(str(p) for p in Path(text).rglob("*.parquet")
                       if not any(part.startswith(("_", ".")) for part in p.relative_to(text).parts))
        what = "no file *.parquet in this folder or below"
    elif glob.has_magic(text):
        paths, what = sorted(glob.glob(text, recursive=True)), "no file matches"
    else:
        paths, what = ([text] if os.path.exists(text) else []), "no such file or folder"
    if not paths:
        raise ParquetError(f"{text}: {what}")
    return text, "", paths


def _common_types(paths: Sequence[str], footers: Sequence[Footer]) -> tuple[dict[str, str], dict[str, str]]:
    """The columns that all files have, and for each of the others a file that lacks it."""
    types = dict(footers[0].types)
    lacking: dict[str, str] = {}
    for path, footer in zip(paths, footers, strict=True):
        if footer.types.keys() != types.keys():
            lacking |= {name: path for name in types if name not in footer.types}
            lacking |= {name: paths[0] for name in footer.types if name not in footers[0].types}
            types = {name: kind for name, kind in types.items() if name in footer.types}
    return types, lacking


def _check_types(fields: Sequence[Field], paths: Sequence[str], footers: Sequence[Footer]) -> None:
    for path, footer in zip(paths, footers, strict=True):
        for field in fields:
            if footer.types[field.name] == SEVERAL:
                raise ParquetError(f"{path}: several columns are called {field.name!r}; write the file with one of "
                                   "each name, or leave them out of the roles")
            if footer.types[field.name] != field.type:
                raise ParquetError(f"{path}: column {field.name!r} holds {footer.types[field.name]}, in {paths[0]} it "
                                   f"holds {field.type}; write the files with one schema, or load them apart")


def table_of(source: FeatureTable | ParquetFiles | Paths, roles: Roles | str | None = None,
             allow_code: Permission | Iterable[str] = (), hash: Mapping[str, int] | None = None, spec: Any = None
             ) -> FeatureTable | ParquetFiles:
    """Returns what a loader was given as a table: a feature table by its folder or its URI, other Parquet as files,
    whose row groups go through `spec`."""
    if isinstance(source, (str, os.PathLike)) and _is_table(os.fspath(source)):
        from sluice.etl.table.table import FeatureTable  # needs delta-rs, which plain Parquet does not

        source = FeatureTable.open(source, allow_code=allow_code)
    if isinstance(source, (str, os.PathLike, Iterable)):
        return ParquetFiles.open(source, roles, hash, permission=Permission.of(allow_code), spec=spec)
    if roles is not None:
        raise ParquetError("roles are for plain Parquet files; this table has its own")
    if hash:
        raise ParquetError("hash is for plain Parquet files; a feature table has the operator hash in its spec")
    return source


def _is_table(name: str) -> bool:
    path = plain_path(name)
    return "://" in path or os.path.isdir(Path(path, "_sluice"))
