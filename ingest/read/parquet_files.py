"""Plain Parquet files as a loader's source: `ParquetFiles` takes a folder, a glob or a list of files, with a role for
each column."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.common.errors import without_keys
from sluice.common.stores import SLOW, Place, plain_path
from sluice.etl.schema import DataFile, Field, Fingerprint
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.table_transform import TableTransform, stored
from sluice.etl.spec.table_transform import transformed as fields_after
from sluice.etl.table.foreign_tables import LocalTables
from sluice.etl.table.table_columns import (
    FileColumns,
    folders_of,
    partitions_of,
)
from sluice.etl.table.table_files import TableFiles, is_delta, is_iceberg, versioned
from sluice.ingest.columns import Columns
from sluice.ingest.plain.file_types import (
    SEVERAL,
    common_type,
    common_types,
    difference,
    refuse_mixed,
)
from sluice.ingest.plain.guess import Proposal, proposals
from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.plain.probe import ColumnFacts, check_values, probe, unreadable
from sluice.ingest.plain.recipe import Recipe
from sluice.ingest.plain.roles import (
    ROLES,
    ParquetError,
    Roles,
    can_hash,
    label_of,
    only_label,
    recipes_of,
    recipes_of_spec,
    roles_of,
)
from sluice.ingest.plain.row_selection import RowSelection, selection_of
from sluice.ingest.read.footers import Footer, footers_of
from sluice.ingest.read.petastorm.options import edited_by, transformed, unischema_of
from sluice.ingest.stages.transform import Transform, given_by, reads_of

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

ONLY_SPLIT = "train"
_SEVERAL_TYPES = "of several types"
_NOT_EVERYWHERE = "not in every file, which a spec can say"
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True)
class ParquetFiles:
    """Parquet files with one schema, which a loader takes in place of a feature table. Without a spec, all rows are in
    one split."""

    uri: str
    fields: tuple[Field, ...]
    files: tuple[DataFile, ...]
    bags: Mapping[str, float]
    """The average number of ids a row in each column of bags."""
    hash: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The columns whose stored values are hashed to ids, and the number of ids."""
    recipes: tuple[Recipe, ...] = ()
    """How each column is made from the stored columns."""
    spec: Spec | None = None
    """The spec that defines the columns and the splits, if there is one."""
    fill: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The value that replaces missing numbers, for columns whose roles were guessed."""
    transforms: tuple[TableTransform, ...] = ()
    """The transforms that the loader applies to the columns."""
    permission: Permission = NOTHING
    """Which functions named by transforms may be imported."""
    located: Mapping[str, FileColumns] = dataclasses.field(default_factory=dict)
    """The path of each file without its delay, and where it has the columns of its table."""
    table: TableFiles | None = None
    """The version of a Delta or Iceberg table that lists the files."""
    transform_spec: Any = None
    """Petastorm's TransformSpec for each row group. All other fields describe the columns after it."""
    functions: tuple[Transform, ...] = ()
    """The functions over rows. The other fields also describe the columns that they give."""

    @classmethod
    def open(
        cls,
        source: Paths,
        roles: Roles | str | None = None,
        hash: Mapping[str, int] | None = None,
        *,
        spec: Spec | str | os.PathLike[str] | None = None,
        version: int | None = None,
        permission: Permission = NOTHING,
        transform_spec: Any = None,
        functions: tuple[Transform, ...] = (),
        say: Callable[[str], None] | None = None,
    ) -> ParquetFiles:
        """Opens the files. A `spec` defines the columns as the ETL would make them, or `roles` gives each a role.

        Without either, roles are guessed. If `roles` names only the label, the others are guessed. `hash` maps names,
        or patterns of names, to numbers of ids. Roles and hash name the columns after `transform_spec`. `say` gets
        lines about what was guessed or left out. By default, each line is printed once on standard error. `version` is
        that of a Delta or Iceberg table, by default its newest."""
        say = say or _print_once
        if spec is not None and not isinstance(spec, Spec):
            spec = Spec.read(spec)
        found = find_files(source, version)
        stored = _StoredColumns.of(found, spec, transform_spec, given_by(functions))
        if spec is None:
            recipes, hashed, fill, is_guessed = _columns_by_roles(stored, roles, hash, say)
        else:
            _refuse_with_spec(roles, hash, transform_spec)
            recipes = recipes_of_spec(spec, stored.types, stored.lacking, found.form)
            hashed, fill, is_guessed = {}, {}, False
            permission = Permission(
                permission.modules, permission.functions | spec.permission.functions
            )
        used = {*stored.used_by(recipes, spec), *reads_of(functions)}
        unused = [name for name in (*stored.types, *stored.lacking) if name not in used]
        if unused and not is_guessed:  # the line about guessed roles has named them
            more = f" and {len(unused) - 20} more" if len(unused) > 20 else ""
            say(f"{found.uri}: columns without a role are left out: {', '.join(unused[:20])}{more}")
        fields = []
        for recipe in recipes:
            kinds = [stored.types.get(name, pa.null()) for name in recipe.sources]
            recipe.check(kinds)
            fields.append(recipe.field(kinds))
        opened = cls(
            found.uri,
            tuple(fields),
            tuple(replace(f.file, path=found.prefix + f.file.path) for f in stored.footers),
            stored.bag_sizes(recipes),
            hashed,
            recipes,
            spec,
            fill,
            permission=permission,
            located=stored.located,
            table=found.table,
            transform_spec=transform_spec,
            functions=functions,
        )
        return opened if spec is None else opened.transformed(spec.transforms)

    @cached_property
    def version(self) -> str:
        """A hash of names, sizes and row groups, after the version of a table. Another version means other rows, or
        another order of rows."""
        named: list[list[Any]] = [
            [os.path.basename(Place.of(f.path).path), f.bytes, f.row_group_rows] for f in self.files
        ]
        for one, located in zip(named, self.located.values(), strict=True):
            if not located.is_own:
                one.append(located.described)
        made: list[Any] = [self.hash] if self.hash else []
        made += [
            recipe.described
            for recipe in self.recipes
            if recipe.role == "label" and recipe.operators
        ]
        if self.spec is not None:
            table = self.spec.table
            made = [
                [recipe.described for recipe in self.recipes],
                [
                    table.seed,
                    table.key,
                    dict(table.split),
                    table.split_by,
                    table.split_column,
                    table.split_time,
                    table.split_from,
                    *([table.unlabelled] if table.unlabelled else []),
                ],
            ]
        text = json.dumps([named, *made] if made else named)
        found = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"v{self.table.version}-{found}" if self.table else found

    def transformed(self, transforms: Iterable[TableTransform]) -> ParquetFiles:
        """Returns the same files with these transforms added. Raises SpecError if one needs a missing column."""
        more = tuple(transforms)
        return replace(
            self, fields=fields_after(self.fields, more), transforms=(*self.transforms, *more)
        )

    @property
    def stored(self) -> tuple[Field, ...]:
        """The columns as the files hold them."""
        return stored(self.fields)

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self.fields, [one.described for one in self.transforms])

    def state(self) -> None:
        """Returns None, because no operator has learned anything."""

    def files_of(self, split: str, *, one_of_many: bool = False) -> tuple[DataFile, ...]:
        """Returns the files, with only the rows of this split counted. Prints how many these are, unless the caller
        takes this split as `one_of_many`."""
        selection = self._selection(split)
        if selection is None:
            return self.files
        counts = self._split_counts[split]
        in_none = sum(map(sum, self._split_counts[""]))
        if split not in self.splits:
            raise ParquetError(
                f"{self.uri}: no row lies in the split {split!r}; check table.split of "
                f"{selection.spec.name}"
            )
        if not one_of_many:
            _print_once(
                f"{self.uri}: {sum(map(sum, counts)):,} of {sum(f.rows for f in self.files):,} rows are loaded, those "
                f"of the split {split!r}; split= chooses another ({', '.join(selection.spec.table.split)})"
            )
        if in_none:
            _print_once(
                f"{self.uri}: {in_none:,} rows lie in no split, because their {selection.sources[0]!r} is missing or "
                "names no split"
            )
        return tuple(
            replace(file, rows=sum(rows), row_group_rows=rows, stored_rows=file.row_group_rows)
            for file, rows in zip(self.files, counts, strict=True)
        )

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have rows."""
        every = tuple(self.spec.table.split) if self.spec else (ONLY_SPLIT,)
        if self._selection(every[0]) is None:
            return every[:1]
        return tuple(split for split in every if any(map(sum, self._split_counts[split])))

    @cached_property
    def _split_counts(self) -> Mapping[str, list[tuple[int, ...]]]:
        """For each split that the spec names, the number of its rows in each row group of each file."""
        selection = self._selection(next(iter(self.spec.table.split))) if self.spec else None
        try:
            return {} if selection is None else selection.counts(self.located)
        except (OSError, pa.ArrowException) as error:
            raise ParquetError(f"{self.uri}: {error}") from error

    def made(self, split: str, names: Container[str]) -> MadeColumns | None:
        """Returns what makes these columns of a split from the stored ones. None: they are read as they are stored."""
        return MadeColumns.of(self.recipes, names, selection=self._selection(split), spec=self.spec)

    def check(self, columns: Columns) -> None:
        """Raises ColumnError if a footer shows a value that a loader of these columns would reject, or if most times in
        the first rows match no format."""
        # Rows without a label are in their own split, so they need no check.
        if self.spec is not None and self.spec.table.unlabelled:
            columns = replace(columns, fill={columns.label: 0.0, **columns.fill})
        given = given_by(self.functions)
        recipes = [one for one in self.recipes if not given.keys() & set(one.sources)]
        if warning := check_values(recipes, columns, self.located):
            _print_once(f"{self.uri}: {warning}")
        for warning in unreadable(
            [recipe for recipe in recipes if recipe.name in columns.names], self.located
        ):
            _print_once(warning)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Returns the number of embedding rows for each column of ids without operators. It is the largest id in the
        footers of all files plus one. Columns without such footers are left out, and those that a TransformSpec
        edits."""
        edited = given_by(self.functions).keys() | edited_by(self.transform_spec)
        sources = {
            recipe.name: recipe.sources[0]
            for recipe in self.recipes
            if recipe.name in names and not recipe.operators and recipe.sources[0] not in edited
        }
        facts = probe(self.located, sources.values(), rows=0, every=True)
        return {
            name: one.high + 1
            for name, source in sources.items()
            if (one := facts.get(source))
            and one.known
            and isinstance(one.low, int)
            and one.low >= 0
        }

    def _selection(self, split: str) -> RowSelection | None:
        if self.spec is not None:
            return selection_of(self.spec, split)
        if split != ONLY_SPLIT:
            raise ParquetError(
                f"{self.uri}: no split {split!r}: plain Parquet files are one, {ONLY_SPLIT!r}; give the "
                "loader only the files of that part, or a spec whose [table] says how to split them"
            )
        return None


@dataclass(frozen=True)
class _StoredColumns:
    """The columns that files hold, after a TransformSpec."""

    uri: str
    located: Mapping[str, FileColumns]
    """The path of each file, and where it has the columns of its table."""
    footers: list[Footer]
    types: dict[str, pa.DataType]
    """The type of each column that all files have, or that is optional."""
    lacking: dict[str, str]
    """For each other column, a file that lacks it."""
    edited: frozenset[str]
    """The columns that the TransformSpec makes."""
    unread: Mapping[str, str]
    """The columns that cannot be read, each with the reason."""

    @classmethod
    def of(
        cls,
        found: FoundFiles,
        spec: Spec | None = None,
        transform_spec: Any = None,
        given: Mapping[str, pa.DataType] = MappingProxyType({}),
    ) -> _StoredColumns:
        located, paths = found.located(spec), found.paths
        footers = footers_of(located, spec.input.columns if spec else None)
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
        return cls(
            found.uri,
            located,
            footers,
            {**types, **given},
            lacking,
            edited | given.keys(),
            found.unread,
        )

    @property
    def rows(self) -> int:
        return sum(footer.file.rows for footer in self.footers)

    def propose(self, label: str | None, by_caller: set[str]) -> dict[str, Proposal]:
        """Guesses the roles of the columns, except of those that the caller hashes."""
        types = {name: kind for name, kind in self.types.items() if name not in self.edited}
        facts = _probe_columns(self.located, types, self.footers)
        facts |= {name: ColumnFacts(self.types[name]) for name in self.edited}
        return {
            name: one
            if one.hash is None or can_hash(self.types[name])
            else replace(one, role="dense", size=0)  # floats cannot be hashed
            for name, one in proposals(facts, self.rows, label, by_caller).items()
        }

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


def _columns_by_roles(
    stored: _StoredColumns,
    roles: Roles | str | None,
    hash: Mapping[str, int] | None,
    say: Callable[[str], None],
) -> tuple[tuple[Recipe, ...], Mapping[str, int], Mapping[str, float], bool]:
    """Makes recipes by a caller's roles. Guesses all roles that the caller does not give. Also returns what is hashed
    and filled, and whether roles were guessed."""
    roles = roles_of(roles) if isinstance(roles, str) else roles
    label = None if roles is None or hash else only_label(roles)
    hashed = dict(hash or {})
    fill = dict[str, float]()
    types, lacking = stored.types, stored.lacking
    is_guessed = roles is None or label_of(label or "", types)[0] in types
    if is_guessed or roles is None:
        by_caller = {recipe.name for recipe in recipes_of({}, hashed, types, lacking)[0]}
        found = stored.propose(label, by_caller)
        hashed |= {
            one.name: one.hash for one in found.values() if one.hash and one.name not in by_caller
        }
        others = {name: _SEVERAL_TYPES for name in types if name not in found}
        others |= {**stored.unread} | dict.fromkeys(lacking, _NOT_EVERYWHERE)
        roles, fill = _report_guesses(stored.uri, found, others, say)
    recipes, hashed = recipes_of(roles, hashed, types, lacking)
    return recipes, hashed, fill, is_guessed


def _refuse_with_spec(
    roles: Roles | str | None, hash: Mapping[str, int] | None, transform_spec: Any
) -> None:
    """Raises ParquetError for arguments that do not go with a spec."""
    if roles is not None or hash:
        raise ParquetError(
            "a spec already says which roles the columns have and what is hashed: give either "
            "spec, or roles and hash"
        )
    if transform_spec is not None:
        raise ParquetError(
            "a spec makes the columns by its operators, a TransformSpec by its function: give "
            "only one of them. With a TransformSpec, give roles and hash"
        )


_printed: set[str] = set()


def _print_once(line: str) -> None:
    """Prints a line on standard error, once, and of all ranks only on the first."""
    if line not in _printed and os.environ.get("RANK", "0") == "0":
        _printed.add(line)
        print(without_keys(line), file=sys.stderr)


def _probe_columns(
    located: Mapping[str, FileColumns], types: Mapping[str, pa.DataType], footers: Sequence[Footer]
) -> dict[str, ColumnFacts]:
    """Returns the facts of each column that has one type in all files, or types that can be loaded together."""
    kinds = {
        name: {
            one[name]
            for one in (footer.types for footer in footers if footer.file.rows)
            if name in one
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
    return probe(located, alike, common=common)


def _report_guesses(
    uri: str, found: Mapping[str, Proposal], others: Mapping[str, str], say: Callable[[str], None]
) -> tuple[Roles, dict[str, float]]:
    """Returns the guessed roles and the fill values, and reports them to `say`. `others` maps each column that was not
    examined to the reason."""
    roles: dict[str, list[str]] = {role: [] for role in ROLES}
    for one in found.values():
        if one.role:
            roles[one.role].append(one.label or one.name)
    fill = {one.name: 0.0 for one in found.values() if one.fill}
    sizes = {one.name: f"%{one.hash}" for one in found.values() if one.hash is not None}
    taken = "; ".join(
        f"{role}: {', '.join(f'{name}{sizes.get(name, str())}' for name in names)}"
        for role, names in roles.items()
        if names
    )
    why = {one.name: one.why for one in found.values() if not one.role} | dict(others)
    left = [f"{name} ({reason})" for name, reason in why.items()]
    filled = f"; empty values of {', '.join(fill)} become 0" if fill else ""
    say(
        f"{uri}: roles guessed ({taken}{filled}{'; left out: ' + ', '.join(left) if left else ''}); give roles= to "
        "choose, or let `sluice guess` write a spec"
    )
    return roles, fill


def facts_of(source: Paths) -> tuple[dict[str, ColumnFacts], int, dict[str, str], str]:
    """Returns the facts of the columns that can be loaded from all files, and the number of rows. It also returns for
    each other column the reason why it cannot be loaded, and the format of the files."""
    found = find_files(source)
    stored = _StoredColumns.of(found)
    lacking, footers = stored.lacking, stored.footers
    types, _ = common_types(found.paths, [footer.types for footer in footers], lacking)
    facts = _probe_columns(stored.located, types, footers)
    for name in lacking.keys() & facts.keys():
        facts[name].optional = True
    others = {
        name: _NOT_EVERYWHERE if name in lacking else _SEVERAL_TYPES
        for name in types
        if name not in facts
    }
    others |= found.unread
    return facts, stored.rows, others, found.form


# ---- files


@dataclass(frozen=True, slots=True)
class FoundFiles:
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


def find_files(source: Paths, version: int | None = None) -> FoundFiles:
    """Returns the files. Those of a folder or a glob are sorted by name. A list keeps its order. Raises
    ForeignTableError for a file that a table may have removed."""
    tables = LocalTables()
    found = _find_files(source, tables, version)
    if found.table is None:
        tables.refuse_removed(found.paths)
        if version is not None:
            raise ParquetError(
                f"{found.uri}: version={version} is for tables, and these are plain files"
            )
    if not found.paths:
        raise ParquetError(f"{found.uri}: this version of the table has no files")
    return found


def _find_files(source: Paths, tables: LocalTables, version: int | None = None) -> FoundFiles:
    """Returns what `find_files` returns. Refuses folders and globs that hold files of a table. Does not check single
    files."""
    if not isinstance(source, (str, os.PathLike)):
        each = [_find_files(one, tables) for one in source]
        if not each:
            raise ParquetError("an empty list of files")
        if (table := next((one for one in each if one.table), None)) and len(each) > 1:
            raise ParquetError(f"{table.uri}: a table is loaded alone; name only this one")
        prefixes = {one.prefix for one in each}
        found = [path for one in each for path in one.paths]
        if again := next(
            (path for path, count in Counter(map(os.path.abspath, found)).items() if count > 1),
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
        if each[0].table:
            return each[0]
        return FoundFiles(f"{len(found)} files from {each[0].uri}", prefixes.pop(), found)
    text = os.fspath(source)
    if text.startswith(f"{SLOW}://") and (at := Place.of(text)).delay_ms is not None:
        found_there = _find_files(at.path, tables, version)
        uri = at.prefix + found_there.uri if found_there.table else text
        return replace(found_there, uri=uri, prefix=at.prefix)
    name, named_version = versioned(text, version)
    if has_versions(name) and not (is_table(name) and "://" not in name):
        table_files = TableFiles.open(name, named_version)
        return FoundFiles(table_files.name, "", list(table_files.files), table_files)
    matches = [text] if os.path.exists(text) else glob.glob(text, recursive=True)
    hidden = {one for one in matches if one != text and Path(one).name.startswith("_")}
    folders = {one for one in matches if os.path.isdir(one)}
    files = {*matches} - folders
    below = (
        str(path)
        for folder in folders - hidden
        for path in Path(folder).rglob("*.parquet")
        if not any(part.startswith(("_", ".")) for part in path.relative_to(folder).parts)
    )
    paths = sorted({str(Path(one)): one for one in (*below, *files)}.values())  # `**` matches both
    if files != {text}:
        tables.refuse_listed([*(f"{one}/" for one in folders), *paths])
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
    return FoundFiles(text, "", paths)


def table_of(
    source: FeatureTable | ParquetFiles | Paths,
    roles: Roles | str | None = None,
    allow_code: Permission | Iterable[str] = (),
    *,
    version: int | None = None,
    transform_spec: Any = None,
    functions: tuple[Transform, ...] = (),
    **columns: Any,
) -> FeatureTable | ParquetFiles:
    """Opens a loader's source: a feature table, a Delta or Iceberg table of another program, or plain Parquet files.
    Row groups of all but the first go through `transform_spec` and the `functions` over rows. `columns` has `hash` and
    `spec`."""
    columns["roles"] = roles
    if isinstance(source, (str, os.PathLike)) and is_table(os.fspath(source)):
        # This needs delta-rs, which plain Parquet does not.
        from sluice.etl.table.table import FeatureTable, ForeignDelta

        name = os.fspath(source)
        try:
            source = FeatureTable.open(name, version, allow_code=allow_code)
            version = None
        except ForeignDelta:  # in a store, where only the log tells
            if "://" not in plain_path(name):
                raise
    if isinstance(source, (str, os.PathLike, Iterable)):
        return ParquetFiles.open(
            source,
            version=version,
            permission=Permission.of(allow_code),
            transform_spec=transform_spec,
            functions=functions,
            **columns,
        )
    for name, value in {"version": version, **columns}.items():
        if value:
            raise ParquetError(
                f"{name} is for plain Parquet files that are named by a path; this table is open, and has its own"
            )
    changes = transform_spec, functions
    if isinstance(source, ParquetFiles) and (source.transform_spec, source.functions) != changes:
        raise ParquetError(
            "these files were opened without this TransformSpec, or without these functions over rows, which define "
            "their columns: give the loader their paths, or give both to ParquetFiles.open"
        )
    return source


def located_of(table: FeatureTable | ParquetFiles) -> tuple[FileColumns, ...]:
    """Returns for each file where it has the columns. Nothing if the files have just their own."""
    return tuple(table.located.values()) if isinstance(table, ParquetFiles) else ()


def has_versions(name: str) -> bool:
    """Whether this is a Delta or an Iceberg table. Every URI of a store counts as one."""
    path = plain_path(versioned(name)[0])
    return is_iceberg(path) or "://" in path or is_delta(path)


def is_table(name: str) -> bool:
    """Whether this is a feature table. Every URI of a store counts as one, but for Iceberg's."""
    path = plain_path(versioned(name)[0])
    return not is_iceberg(path) and ("://" in path or os.path.isdir(Path(path, "_sluice")))
