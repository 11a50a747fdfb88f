"""Describes what a loader loads: `LoaderInput`, the rows of a split with their order and columns. Nothing runs yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sluice.common.native import require_kernel
from sluice.etl.schema import Fingerprint, digest
from sluice.ingest.cache.made_rows import cache_of
from sluice.ingest.cache.table_functions import fields_given, over_rows
from sluice.ingest.choices import AUTO, history_name
from sluice.ingest.columns import Columns
from sluice.ingest.errors import LoaderError
from sluice.ingest.loader_config import LoaderConfig
from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.plain.recipe import Recipe
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.kept_files import first_schema
from sluice.ingest.read.parquet_files import ParquetFiles, located_of, table_of
from sluice.ingest.read.petastorm.options import (
    fields_after,
    spec_functions,
    split_transform_spec,
)
from sluice.ingest.read.reader import RowGroupReader
from sluice.ingest.read.sources import RowGroupSource, source_of
from sluice.ingest.read.user_history import UserHistories, histories_of
from sluice.ingest.row_order import RowsPlan
from sluice.ingest.stages.transform import (
    Transform,
    address_of,
    given_by,
    needed_before,
    transforms_of,
)

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderInput:
    """The rows of a split, their order, their columns, and the functions that transform them."""

    config: LoaderConfig
    table: FeatureTable | ParquetFiles
    layout: str
    """The fingerprint of the columns, after a TransformSpec among the transforms."""
    columns: Columns
    """The columns of a batch."""
    groups: RowGroupReader
    rows: RowGroupSource
    functions: tuple[Transform, ...]
    """The functions over rows."""
    plan: RowsPlan
    transforms: Sequence[Transform]
    """The transforms of the table's spec, then the user's."""
    code: Mapping[str, str | None]
    """Each transform's name, and `module:function` if it can be imported."""

    @property
    def identity(self) -> dict[str, Any]:
        """The values by which a state is recognised as belonging to these rows."""
        known = {"version": self.table.version, "split": self.config.split}
        if self.rows.chosen_rows:
            known["rows of the predicate"] = self.rows.chosen_rows
        return known

    @property
    def cardinalities(self) -> dict[str, int]:
        """The number of ids of each column of ids. That of a plain file's column comes from the footers, if they have
        it and no TransformSpec edits the column."""
        known = dict(self.columns.cardinalities)
        unknown = [name for name in self.columns.sparse if name not in known]
        if unknown and isinstance(self.table, ParquetFiles):
            sizes = self.table.sizes(unknown)
            known |= {
                n: max(size, 1 + int(self.columns.fill.get(n, 0))) for n, size in sizes.items()
            }
        history = self.config.history
        for name in history.columns if history else ():
            if name in known:
                known[history_name(name)] = known[name]
        return {name: known[name] for name in self.columns.sparse if name in known}


def open_input(config: LoaderConfig) -> LoaderInput:
    """Returns the input for a split of a table. It reads footers at most."""
    require_kernel()
    others, transform_spec = split_transform_spec(config.transforms)
    own = transforms_of(others)
    users = tuple(t for t in own if t.gives)
    table = table_of(
        config.source,
        config.roles,
        config.allow_code,
        hash=config.hash,
        spec=config.spec,
        version=config.version,
        transform_spec=transform_spec,
        functions=users,
    )
    code = {} if transform_spec is None else {"TransformSpec": address_of(transform_spec.func)}
    code |= {transform.name: transform.code for transform in own}
    given, predicate = given_by(users), config.reading.petastorm.predicate
    fields, layout = table.fields, table.fingerprint.layout
    if transform_spec or given:
        if not isinstance(table, ParquetFiles):  # which was opened with both
            fields = fields_after(fields, table.schema, transform_spec, given)
        layout = Fingerprint.of(fields).layout
    history = config.history
    if history is not None:
        _refuse_changes({"predicate": predicate, "TransformSpec": transform_spec, **given})
    transforms, kept = _split_transforms(config, table)
    if isinstance(table, ParquetFiles):
        columns = Columns.of(fields, config.fill, table.bags, table.fill)
        if predicate is None and transform_spec is None:  # they may change values and skip rows
            table.check(columns)
        make = partial(table.made, config.split)
    else:
        fields = fields_given(fields, given_by(kept))
        state = table.state() if any(field.online for field in fields) else None
        recipes = [Recipe.of_field(field, state) for field in fields]
        columns = Columns.of(fields, config.fill)
        make = partial(MadeColumns.of, recipes, bags=columns.bags)
    histories = histories_of(history, table, config.split, columns, make)
    made = make(columns.names)
    functions = (*users, *kept)
    groups = _row_groups(config, table, columns, made, histories, functions, transform_spec)
    reader = config.reading.reader
    if isinstance(table, ParquetFiles) and predicate is transform_spec is None:
        reader = "arrow" if reader in (None, AUTO) else reader
    rows = source_of(reader, groups, predicate)
    return LoaderInput(
        config=config,
        table=table,
        layout=digest([layout, asdict(history)]) if history else layout,
        columns=histories.columns if histories else columns,
        groups=groups,
        rows=rows,
        functions=groups.functions,
        plan=RowsPlan.of(config.order, rows.row_groups, config.batch_size, config.seed),
        transforms=[*transforms, *(t for t in own if not t.gives)],
        code=code,
    )


def _refuse_changes(changes: Mapping[str, Any]) -> None:
    """Raises if rows or values change before histories are made."""
    changed = ", ".join(name for name, value in changes.items() if value is not None)
    if changed:
        raise LoaderError(
            f"history with {changed}: events are read as they are stored. Write the rows that you want as "
            "files, or leave one of the two out"
        )


def _row_groups(  # noqa: PLR0917 # called once
    config: LoaderConfig,
    table: FeatureTable | ParquetFiles,
    columns: Columns,
    made: MadeColumns | None,
    histories: UserHistories | None,
    functions: tuple[Transform, ...],
    transform_spec: Any,
) -> RowGroupReader:
    files, located = table.files_of(config.split), located_of(table)
    opener = config.reading.files or FileOpener()
    names: Sequence[str] = made.sources if made else columns.names
    predicate = config.reading.petastorm.predicate
    if transform_spec is not None:
        stored = first_schema(files, opener, located)
        wanted = needed_before(names, functions)
        functions = (*spec_functions(transform_spec, wanted, stored), *functions)
    groups = RowGroupReader(
        files,
        names,
        opener,
        bags=columns.bags,
        is_filtered=predicate is not None,
        filters=sorted(predicate.get_fields()) if predicate else (),
        made=made,
        located=located,
        in_pages=True,
        history=histories,
        functions=functions,
    )
    groups.cache = cache_of(config.cache, groups.functions, names, len(files), groups.source_of)
    return groups


def _split_transforms(
    config: LoaderConfig, table: FeatureTable | ParquetFiles
) -> tuple[Sequence[Transform], tuple[Transform, ...]]:
    """Returns a table's transforms over batches, and before them those over rows, whose results a cache keeps."""
    if not table.transforms:
        return [], ()
    # This needs torch, which remote workers do not import.
    from sluice.ingest.column_transforms import bound

    transforms = bound(table.transforms, table.stored, table.permission)
    if not config.cache or config.history or isinstance(table, ParquetFiles):
        return transforms, ()
    kept = over_rows(transforms, table)
    return transforms[len(kept) :], kept
