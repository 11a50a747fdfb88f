"""Any Parquet files as a loader's source: `ParquetFiles`, a folder, a glob or a list of them, with a role for each
column. What the footers say is remembered beside the files."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from etl.fields import DataFile, Field
from etl.permission import Permission
from ingest.files import UNREADABLE
from ingest.knobs import nearest

if TYPE_CHECKING:
    from etl.table import FeatureTable

REMEMBERED = ".sluice-footers.json"
_TAIL = 8  # bytes behind a footer: its length, and what marks the file's end
ONLY_SPLIT = "train"
ROLES = ("label", "weight", "dense", "sparse", "id_list")
_LABELS = ("label", "target", "click", "clicked", "y", "is_click", "conversion")
_WEIGHTS = ("weight", "sample_weight")

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Roles = Mapping[str, str | Sequence[str]]
"""Role to the names, or patterns of names, of its columns: `{"label": "click", "dense": "I*", "sparse": ["C*"]}`."""


class ParquetError(ValueError):
    """Files that cannot be loaded together: the message names the file or the column, and what to do."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What is kept of a file's footer."""

    bytes: int
    modified_ns: int
    row_groups: tuple[int, ...]
    types: Mapping[str, str]
    """Arrow's name of each column's type."""
    ids: Mapping[str, int]
    """Of each column that may hold bags, all ids in the file, as far as a footer tells."""
    digest: str = ""
    """Of the footer's own bytes."""

    @property
    def proof(self) -> str:
        """Of the footer's bytes and of what was read out of them: what is remembered is believed only with this."""
        told = json.dumps([self.digest, self.row_groups, dict(self.types), dict(self.ids)])
        return hashlib.sha256(told.encode()).hexdigest()


@dataclass(frozen=True)
class ParquetFiles:
    """Some Parquet files of one schema. It stands where a loader takes a feature table; all files are one split."""

    uri: str
    fields: tuple[Field, ...]
    files: tuple[DataFile, ...]
    bags: Mapping[str, float]
    """Ids of a row in each column of bags, on average."""

    @classmethod
    def open(cls, source: Paths, roles: Roles | None = None) -> ParquetFiles:
        """Without `roles` they are guessed by name and type, and printed on standard error."""
        uri, paths = _paths(source)
        footers = _footers(paths)
        types, lacking = _common_types(paths, footers)
        if roles is None:
            roles = guess(types)
            told = "; ".join(f"{role}: {', '.join(names)}" for role, names in roles.items() if names)
            left = [name for name in (*types, *lacking) if not any(name in names for names in roles.values())]
            print(f"{uri}: roles guessed ({told}{'; left out: ' + ', '.join(left) if left else ''}); give roles= to "
                  "choose", file=sys.stderr)
        fields = tuple(_fields(roles, types, lacking))
        _check_types(fields, paths, footers)
        files = tuple(DataFile(path=p, rows=sum(f.row_groups), bytes=f.bytes, row_group_rows=f.row_groups)
                      for p, f in zip(paths, footers, strict=True))
        rows = max(1, sum(f.rows for f in files))
        bags = [field.name for field in fields if field.role == "id_list" and field.name in footers[0].ids]
        return cls(uri, fields, files, {name: sum(f.ids[name] for f in footers) / rows for name in bags})

    @cached_property
    def version(self) -> str:
        """Of names, sizes and row groups: another one means other rows, or in another order."""
        text = json.dumps([[os.path.basename(f.path), f.bytes, f.row_group_rows] for f in self.files])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def state(self) -> None:
        """No operator has learned anything."""

    def files_of(self, split: str) -> tuple[DataFile, ...]:
        if split != ONLY_SPLIT:
            raise ParquetError(f"{self.uri}: no split {split!r}: plain Parquet files are one, {ONLY_SPLIT!r}; give the "
                               "loader the files of a part")
        return self.files


def guess(types: Mapping[str, str]) -> dict[str, list[str]]:
    """Roles by name and type: the label by its name, floats dense, whole numbers sparse, lists of them bags."""
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    by_name = {name.lower(): name for name in reversed(list(types))}
    label = next((by_name[n] for n in _LABELS if n in by_name), None)
    if label is None:
        raise ParquetError(f"no column is called {', '.join(_LABELS[:-1])} or {_LABELS[-1]}: say which is the label, "
                           f"roles={{'label': …}} (columns: {', '.join(list(types)[:20])})")
    for name, kind in types.items():
        if name == label:
            found["label"].append(name)
        elif name.lower() in _WEIGHTS:
            found["weight"].append(name)
        elif kind in ("float", "double", "halffloat"):
            found["dense"].append(name)
        elif kind.startswith(("int", "uint")):
            found["sparse"].append(name)
        elif kind.startswith(("list<", "large_list<")) and "int" in kind:
            found["id_list"].append(name)
    return found


def _fields(roles: Roles, types: Mapping[str, str], lacking: Mapping[str, str]) -> Iterable[Field]:
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
    for name in types:
        if name in role_of:
            kind = types[name]
            layout = "scalar" if role_of[name] != "id_list" else "bytes" if "binary" in kind else "list"
            yield Field(name=name, role=role_of[name], type=kind, layout=layout)


# ---- files

def _paths(source: Paths) -> tuple[str, list[str]]:
    """What it is called, and the files in the order of their names (a list keeps its own)."""
    if not isinstance(source, (str, os.PathLike)):
        paths = [os.fspath(p) for p in source]
        if not paths:
            raise ParquetError("an empty list of files")
        return f"{len(paths)} files from {paths[0]}", paths
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
    return text, paths


def _footers(paths: Sequence[str]) -> list[Footer]:
    """Of all files, in parallel; those not changed since last time are taken from what was remembered."""
    root = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths])
    names = [os.path.relpath(os.path.abspath(p), root) for p in paths]
    known = _remembered(root)

    def footer(path: str, name: str) -> Footer:
        try:
            status = os.stat(path)
            before, digest = known.get(name), _digest(path, status.st_size)
            if before is not None and (before.bytes, before.modified_ns, before.digest) == (
                    status.st_size, status.st_mtime_ns, digest):
                return before
            metadata = pq.read_metadata(path)
            schema = metadata.schema.to_arrow_schema()
            row_groups = tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups))
            ids = _ids(metadata, schema)
        except UNREADABLE as error:
            raise ParquetError(f"{path}: the footer cannot be read: {error}") from error
        twice = [name for name, times in Counter(schema.names).items() if times > 1]
        if twice:
            raise ParquetError(f"{path}: two columns are called {twice[0]!r}; give one of them another name")
        if sum(row_groups) != metadata.num_rows or any(rows < 0 for rows in row_groups):
            raise ParquetError(f"{path}: the footer speaks of {metadata.num_rows} rows, and its row groups of "
                               f"{sum(row_groups)}; the file is damaged")
        types = {f.name: str(f.type) for f in schema}
        return Footer(status.st_size, status.st_mtime_ns, row_groups, types, ids, digest)

    with ThreadPoolExecutor(16, "sluice-footers") as pool:
        found = list(pool.map(footer, paths, names))
    if any(known.get(name) is not f for name, f in zip(names, found, strict=True)):
        _remember(root, {**known, **dict(zip(names, found, strict=True))})
    return found


def _digest(path: str, size: int) -> str:
    """Of the footer's bytes, which lie at the file's end with their length behind them. Reading them takes a tenth of
    the time that Arrow takes to understand them."""
    with open(path, "rb") as file:
        file.seek(max(0, size - _TAIL))
        length = int.from_bytes(file.read(_TAIL)[:4], "little")
        file.seek(max(0, size - _TAIL - length))
        return hashlib.sha256(file.read(length + _TAIL)).hexdigest()


def _ids(metadata: pq.FileMetaData, schema: pa.Schema) -> dict[str, int]:
    """A list's values are counted (an empty list as one); of binary columns, the bytes without their lengths: with page
    heads, and repeated bags of a dictionary once, so this is no more than a good guess."""
    lists = {f.name for f in schema if pa.types.is_list(f.type) or pa.types.is_large_list(f.type)}
    packed = {f.name for f in schema if pa.types.is_binary(f.type) or pa.types.is_large_binary(f.type)}
    if not lists and not packed:
        return {}
    leaves = {leaf: name for leaf in range(metadata.num_columns)
              if (name := metadata.schema.column(leaf).path.split(".")[0]) in lists | packed}
    found = dict.fromkeys(leaves.values(), 0)
    for group in range(metadata.num_row_groups):
        for leaf, name in leaves.items():
            chunk = metadata.row_group(group).column(leaf)
            found[name] += chunk.num_values if name in lists else \
                max(0, chunk.total_uncompressed_size // 4 - chunk.num_values)
    return found


def _remembered(root: str) -> dict[str, Footer]:
    """Nothing, if there is no such file or it cannot be understood: then the footers are read again."""
    try:
        content = json.loads(Path(root, REMEMBERED).read_text())
        types = [dict(t) for t in content["types"]]
        found = {name: (Footer(size, modified, tuple(groups), types[kind], dict(ids), digest), proof)
                 for name, (size, modified, groups, kind, ids, digest, proof) in content["files"].items()}
        return {name: footer for name, (footer, proof) in found.items() if footer.proof == proof}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}


def _remember(root: str, footers: Mapping[str, Footer]) -> None:
    """Many files share a schema, which is kept once. A folder that cannot be written is left as it is."""
    kinds: dict[str, int] = {}
    files = {name: [f.bytes, f.modified_ns, f.row_groups, kinds.setdefault(json.dumps(list(f.types.items())),
                                                                           len(kinds)), f.ids, f.digest, f.proof]
             for name, f in footers.items()}
    target = Path(root, REMEMBERED)
    new = target.with_name(f"{REMEMBERED}.{secrets.token_hex(8)}.{os.getpid()}")  # `doctor` knows drafts by the number
    with contextlib.suppress(OSError):
        with open(new, "x") as draft:
            json.dump({"types": [json.loads(kind) for kind in kinds], "files": files}, draft)
        os.replace(new, target)


def _common_types(paths: Sequence[str], footers: Sequence[Footer]) -> tuple[dict[str, str], dict[str, str]]:
    """The columns that all files have, and of the others a file that lacks them."""
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
            if footer.types[field.name] != field.type:
                raise ParquetError(f"{path}: column {field.name!r} holds {footer.types[field.name]}, in {paths[0]} it "
                                   f"holds {field.type}; write the files with one schema, or load them apart")


def table_of(source: FeatureTable | ParquetFiles | Paths, roles: Roles | None = None,
             allow_code: Permission | Iterable[str] = ()) -> FeatureTable | ParquetFiles:
    """What a loader was given, as a table: a feature table by its folder or its URI, other Parquet as files."""
    if isinstance(source, (str, os.PathLike)) and ("://" in str(source) or os.path.isdir(Path(source, "_sluice"))):
        from etl.table import FeatureTable  # needs delta-rs, which plain Parquet does not

        source = FeatureTable.open(source, allow_code=allow_code)
    if isinstance(source, (str, os.PathLike, Iterable)):
        return ParquetFiles.open(source, roles)
    if roles is not None:
        raise ParquetError("roles are for plain Parquet files; this table has its own")
    return source
