"""Plain Parquet files as a loader's source: `ParquetFiles` takes a folder, a glob or a list of files, with a role for
each column."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.common.lines import say
from sluice.common.stores import Place, plain_path
from sluice.etl.schema import DataFile, Field, Fingerprint, abridged
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.table_transform import TableTransform, stored
from sluice.etl.spec.table_transform import transformed as fields_after
from sluice.etl.table.table_columns import (
    FileColumns,
)
from sluice.etl.table.table_files import TableFiles
from sluice.ingest.columns import Columns
from sluice.ingest.plain.guess import Proposal
from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.plain.probe import check_values, probe, unreadable
from sluice.ingest.plain.recipe import Recipe
from sluice.ingest.plain.roles import (
    ROLES,
    ParquetError,
    Roles,
    label_of,
    only_label,
    recipes_of,
    recipes_of_spec,
    roles_of,
)
from sluice.ingest.plain.row_selection import RowSelection, selection_of
from sluice.ingest.read.petastorm.options import edited_by
from sluice.ingest.read.source_files import (
    NOT_EVERYWHERE,
    SEVERAL_TYPES,
    Paths,
    SourceColumns,
    SourceFiles,
    find_files,
    is_table,
)
from sluice.ingest.stages.transform import Transform, given_by, reads_of

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

ONLY_SPLIT = "train"


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
        files = find_files(source, version)
        stored = SourceColumns.of(files, spec, transform_spec, given_by(functions))
        if spec is None:
            recipes, hashed, fill, is_guessed = _columns_by_roles(files, stored, roles, hash, say)
        else:
            _refuse_with_spec(roles, hash, transform_spec)
            recipes = recipes_of_spec(spec, stored.types, stored.lacking, files.form)
            hashed, fill, is_guessed = {}, {}, False
            permission = Permission(
                permission.modules, permission.functions | spec.permission.functions
            )
        used = {*stored.used_by(recipes, spec), *reads_of(functions)}
        unused = [name for name in (*stored.types, *stored.lacking) if name not in used]
        if unused and not is_guessed:  # the line about guessed roles has named them
            say(f"{files.uri}: columns without a role are left out: {abridged(unused, 20)}")
        fields = []
        for recipe in recipes:
            kinds = [stored.types.get(name, pa.null()) for name in recipe.sources]
            recipe.check(kinds)
            fields.append(recipe.field(kinds))
        opened = cls(
            files.uri,
            tuple(fields),
            tuple(replace(f.file, path=files.prefix + f.file.path) for f in stored.footers),
            stored.bag_sizes(recipes),
            hashed,
            recipes,
            spec,
            fill,
            permission=permission,
            located=stored.located,
            table=files.table,
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
        for entry, located in zip(named, self.located.values(), strict=True):
            if not located.is_own:
                entry.append(located.described)
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
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"v{self.table.version}-{digest}" if self.table else digest

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
        return Fingerprint.of(self.fields, [transform.described for transform in self.transforms])

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
        recipes = [recipe for recipe in self.recipes if not given.keys() & set(recipe.sources)]
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
            name: column.high + 1
            for name, source in sources.items()
            if (column := facts.get(source))
            and column.known
            and isinstance(column.low, int)
            and column.low >= 0
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


def _columns_by_roles(
    files: SourceFiles,
    stored: SourceColumns,
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
        guessed = stored.propose(label, by_caller)
        hashed |= {
            proposal.name: proposal.hash
            for proposal in guessed.values()
            if proposal.hash and proposal.name not in by_caller
        }
        others = {name: SEVERAL_TYPES for name in types if name not in guessed}
        others |= files.unread | dict.fromkeys(lacking, NOT_EVERYWHERE)
        roles, fill = _report_guesses(files.uri, guessed, others, say)
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


@cache
def _print_once(line: str) -> None:
    """Prints a line on standard error, once, and of all ranks only on the first."""
    if os.environ.get("RANK", "0") == "0":
        say(line)


def _report_guesses(
    uri: str, guessed: Mapping[str, Proposal], others: Mapping[str, str], say: Callable[[str], None]
) -> tuple[Roles, dict[str, float]]:
    """Returns the guessed roles and the fill values, and reports them to `say`. `others` maps each column that was not
    examined to the reason."""
    roles: dict[str, list[str]] = {role: [] for role in ROLES}
    for proposal in guessed.values():
        if proposal.role in roles:
            roles[proposal.role].append(proposal.label or proposal.name)
    fill = {
        name: 0.0
        for name, proposal in guessed.items()
        if proposal.role in ("dense", "weight")
        and (proposal.facts.nulls or proposal.facts.unusable)
    }
    sizes = {
        proposal.name: f"%{proposal.hash}"
        for proposal in guessed.values()
        if proposal.hash is not None
    }
    taken = "; ".join(
        f"{role}: {', '.join(f'{name}{sizes.get(name, str())}' for name in names)}"
        for role, names in roles.items()
        if names
    )
    why = {
        proposal.name: proposal.why for proposal in guessed.values() if proposal.role not in roles
    } | dict(others)
    left = [f"{name} ({reason})" for name, reason in why.items()]
    filled = f"; empty values of {', '.join(fill)} become 0" if fill else ""
    say(
        f"{uri}: roles guessed ({taken}{filled}{'; left out: ' + ', '.join(left) if left else ''}); give roles= to "
        "choose, or let `sluice guess` write a spec"
    )
    return roles, fill


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
