"""The files of a source, and the columns that they hold. `find_files` takes a folder, a glob, a list of files, or a
Delta or Iceberg table. `SourceColumns` and `facts_of` read the footers."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from sluice.common.stores import SLOW, Place, plain_path
from sluice.etl.spec.spec import Spec
from sluice.etl.table.foreign_tables import LocalTables
from sluice.etl.table.table_columns import (
    FileColumns,
    folders_of,
    partitions_of,
)
from sluice.etl.table.table_files import TableFiles, is_delta, is_iceberg, versioned
from sluice.ingest.plain.file_types import (
    SEVERAL,
    common_type,
    common_types,
    difference,
    refuse_mixed,
)
from sluice.ingest.plain.guess import Proposal, proposals
from sluice.ingest.plain.probe import ColumnFacts, probe
from sluice.ingest.plain.recipe import Recipe
from sluice.ingest.plain.roles import ParquetError, can_hash
from sluice.ingest.read.footers import Footer, footers_of
from sluice.ingest.read.petastorm.options import edited_by, transformed, unischema_of

SEVERAL_TYPES = "of several types"
NOT_EVERYWHERE = "not in every file, which a spec can say"

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files of a source."""

    uri: str
    """The name of the source. A table's has its version."""
    prefix: str
    """The prefix of the paths."""
    paths: list[str]
    table: TableFiles | None = None
    """The table that lists the files."""

    @property
    def form(self) -> str:
        return "parquet" if self.table is None else self.table.kind

    @property
    def unread(self) -> dict[str, str]:
        """The columns that cannot be read, each with the reason."""
        if self.table is not None:
            return dict(self.table.unread)
        named = [folders_of(path).keys() for path in self.paths]
        partly = set().union(*named) - set(named[0]).intersection(*named)
        return dict.fromkeys(sorted(partly), "only some folders have it in their names")

    def located(self, spec: Spec | None) -> Mapping[str, FileColumns]:
        """Returns for each file where it has the columns."""
        if self.table is not None:
            return self.table.columns
        kinds = spec.input.columns if spec else {}
        texts = [name for name, kind in kinds.items() if kind == "text"]
        return dict(zip(self.paths, partitions_of(self.paths, texts), strict=True))


def find_files(source: Paths, version: int | None = None) -> SourceFiles:
    """Returns the files. Those of a folder or a glob are sorted by name. A list keeps its order. Raises
    ForeignTableError for a file that a table may have removed."""
    tables = LocalTables()
    files = _find_files(source, tables, version)
    if files.table is None:
        tables.refuse_removed(files.paths)
        if version is not None:
            raise ParquetError(
                f"{files.uri}: version={version} is for tables, and these are plain files"
            )
    if not files.paths:
        raise ParquetError(f"{files.uri}: this version of the table has no files")
    return files


def _find_files(source: Paths, tables: LocalTables, version: int | None = None) -> SourceFiles:
    """Returns what `find_files` returns. Refuses folders and globs that hold files of a table. Does not check single
    files."""
    if not isinstance(source, (str, os.PathLike)):
        parts = [_find_files(part, tables) for part in source]
        if not parts:
            raise ParquetError("an empty list of files")
        if (table := next((part for part in parts if part.table), None)) and len(parts) > 1:
            raise ParquetError(f"{table.uri}: a table is loaded alone; name only this one")
        prefixes = {part.prefix for part in parts}
        inside = [path for part in parts for path in part.paths]
        if again := next(
            (path for path, count in Counter(map(os.path.abspath, inside)).items() if count > 1),
            None,
        ):
            raise ParquetError(
                f"{again}: is meant twice, so each of its rows would come twice an epoch. Name the file, "
                "or a folder or glob that holds it, only once"
            )
        if len(prefixes) > 1:
            raise ParquetError(
                f"the files have different delays ({', '.join(sorted(prefixes))}): give all "
                "of them one delay, or none"
            )
        if parts[0].table:
            return parts[0]
        return SourceFiles(f"{len(inside)} files from {parts[0].uri}", prefixes.pop(), inside)
    text = os.fspath(source)
    if text.startswith(f"{SLOW}://") and (at := Place.of(text)).delay_ms is not None:
        found_there = _find_files(at.path, tables, version)
        uri = at.prefix + found_there.uri if found_there.table else text
        return replace(found_there, uri=uri, prefix=at.prefix)
    name, named_version = versioned(text, version)
    if has_versions(name) and not (is_table(name) and "://" not in name):
        table_files = TableFiles.open(name, named_version)
        return SourceFiles(table_files.name, "", list(table_files.files), table_files)
    matches = [text] if os.path.exists(text) else glob.glob(text, recursive=True)
    hidden = {match for match in matches if match != text and Path(match).name.startswith("_")}
    folders = {match for match in matches if os.path.isdir(match)}
    files = {*matches} - folders
    below = (
        str(path)
        for folder in folders - hidden
        for path in Path(folder).rglob("*.parquet")
        if not any(part.startswith(("_", ".")) for part in path.relative_to(folder).parts)
    )
    paths = sorted({str(Path(path)): path for path in (*below, *files)}.values())  # `**` has both
    if files != {text}:
        tables.refuse_listed([*(f"{folder}/" for folder in folders), *paths])
    if not paths:
        what = "no such file or folder"
        if folders:
            what = (
                "no *.parquet file in this folder or below (`sluice guess` and `sluice etl` make a table of "
                "other logs)"
            )
        elif any(character in text for character in "*?["):
            what = "no file matches this pattern"
        raise ParquetError(f"{text}: {what}")
    return SourceFiles(text, "", paths)


def has_versions(name: str) -> bool:
    """Whether this is a Delta or an Iceberg table. Every URI of a store counts as one."""
    path = plain_path(versioned(name)[0])
    return is_iceberg(path) or "://" in path or is_delta(path)


def is_table(name: str) -> bool:
    """Whether this is a feature table. Every URI of a store counts as one, but for Iceberg's."""
    path = plain_path(versioned(name)[0])
    return not is_iceberg(path) and ("://" in path or os.path.isdir(Path(path, "_sluice")))


@dataclass(frozen=True)
class SourceColumns:
    """The columns that files hold, after a TransformSpec."""

    located: Mapping[str, FileColumns]
    """The path of each file, and where it has the columns of its table."""
    footers: list[Footer]
    types: dict[str, pa.DataType]
    """The type of each column that all files have, or that is optional."""
    lacking: dict[str, str]
    """For each other column, a file that lacks it."""
    edited: frozenset[str]
    """The columns that the TransformSpec makes."""

    @classmethod
    def of(
        cls,
        files: SourceFiles,
        spec: Spec | None = None,
        transform_spec: Any = None,
        given: Mapping[str, pa.DataType] = MappingProxyType({}),
    ) -> SourceColumns:
        located, paths = files.located(spec), files.paths
        footers = footers_of(located, spec.input if spec else None)
        located = {footer.file.path: footer.columns for footer in footers}
        optional = spec.input.optional if spec else ()
        types, lacking = common_types(paths, [footer.types for footer in footers], optional)
        edited = frozenset[str]()
        if transform_spec is not None:
            first = pa.schema(footers[0].types)
            # Files of one schema are checked once.
            schemas = {pa.schema(f.types): f.file.path for f in footers if f.file.rows}
            known = unischema_of(first).fields
            needed = pa.schema([field for field in first if field.name in known])
            for there, path in schemas.items() if transform_spec.func else ():
                if wrong := difference(needed, there, paths[0]):
                    raise ParquetError(
                        f"{path}: {wrong}. The TransformSpec's function gets every column"
                    )
            after = transformed(first, transform_spec)
            edited = frozenset(edited_by(transform_spec)).intersection(after.names)
            types = {f.name: f.type for f in after if f.name in edited or f.name in types}
        return cls(located, footers, {**types, **given}, lacking, edited | given.keys())

    @property
    def rows(self) -> int:
        return sum(footer.file.rows for footer in self.footers)

    def propose(self, label: str | None, by_caller: set[str]) -> dict[str, Proposal]:
        """Guesses the roles of the columns, except of those that the caller hashes."""
        types = {name: kind for name, kind in self.types.items() if name not in self.edited}
        facts = self.probe(types)
        facts |= {name: ColumnFacts(self.types[name]) for name in self.edited}
        return {
            name: proposal
            if proposal.hash is None or can_hash(self.types[name])
            else replace(proposal, role="dense", size=0)  # floats cannot be hashed
            for name, proposal in proposals(facts, self.rows, label, by_caller).items()
        }

    def probe(self, types: Mapping[str, pa.DataType]) -> dict[str, ColumnFacts]:
        """Returns the facts of each column that has one type in all files, or types that can be loaded together."""
        kinds = {
            name: {
                own_types[name]
                for own_types in (footer.types for footer in self.footers if footer.file.rows)
                if name in own_types
            }
            for name in types
        }
        common = {
            name: mixed
            for name in types
            if len(kinds[name]) > 1 and (mixed := common_type(kinds[name]))
        }
        alike = [
            name
            for name, kind in types.items()
            if name in common or (kind != SEVERAL and kinds[name] <= {kind})
        ]
        return probe(self.located, alike, common=common)

    def used_by(self, recipes: Sequence[Recipe], spec: Spec | None) -> list[str]:
        """Returns the stored columns that recipes and spec use. Raises an error if their types cannot be loaded
        together."""
        by_spec = spec.input.columns if spec else {}
        unused = spec.unused if spec else ()
        sources = (name for recipe in recipes for name in recipe.sources)
        used = list(dict.fromkeys([*sources, *(n for n in by_spec if n not in unused)]))
        refuse_mixed(
            [name for name in used if name not in self.edited],
            recipes,
            by_spec,
            [
                (footer.file.path, footer.types)
                for footer in self.footers
                if footer.file.rows  # a file without rows may have no types
            ],
        )
        return used

    def bag_sizes(self, recipes: Sequence[Recipe]) -> dict[str, float]:
        """Returns the average number of ids a row in each column of bags."""
        return {
            recipe.name: sum(f.ids[recipe.sources[0]] for f in self.footers) / max(1, self.rows)
            for recipe in recipes
            if recipe.role == "id_list" and recipe.sources[0] in self.footers[0].ids
        }


def facts_of(source: Paths) -> tuple[dict[str, ColumnFacts], int, dict[str, str], str]:
    """Returns the facts of the columns that can be loaded from all files, and the number of rows. It also returns for
    each other column the reason why it cannot be loaded, and the format of the files."""
    files = find_files(source)
    stored = SourceColumns.of(files)
    lacking = stored.lacking
    types, _ = common_types(files.paths, [footer.types for footer in stored.footers], lacking)
    facts = stored.probe(types)
    for name in lacking.keys() & facts.keys():
        facts[name].optional = True
    others = {
        name: NOT_EVERYWHERE if name in lacking else SEVERAL_TYPES
        for name in types
        if name not in facts
    }
    others |= files.unread
    return facts, stored.rows, others, files.form
