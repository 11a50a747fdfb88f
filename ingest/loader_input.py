"""Describes what a loader loads: `LoaderInput`, the rows of a split with their order and columns. Nothing runs yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sluice.etl.schema import DataFile, Field, Fingerprint, digest
from sluice.ingest.choices import History, history_name
from sluice.ingest.columns import Columns
from sluice.ingest.errors import LoaderError
from sluice.ingest.loader_config import LoaderConfig
from sluice.ingest.plain.made_columns import MadeColumns
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.pages import load_compiled
from sluice.ingest.read.parquet_files import ParquetFiles, located_of, table_of
from sluice.ingest.read.petastorm.options import (
    PetastormOptions,
    check_filters,
    fields_after,
    fields_with,
    filters_of,
    spec_functions,
    split_transform_spec,
)
from sluice.ingest.read.reader import RowGroupReader, first_schema
from sluice.ingest.read.sources import Reading, RowGroupSource, source_of
from sluice.ingest.read.user_history import UserHistories, histories_of
from sluice.ingest.row_order import Order, RowsPlan
from sluice.ingest.stages.table_operators import OperatorColumns, Operators
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
    reading: Reading
    """With the opener of files, and a TransformSpec that was among the transforms."""
    layout: str
    """The fingerprint of the columns, after a TransformSpec among the transforms."""
    columns: Columns
    """The columns of a batch."""
    groups: RowGroupReader
    rows: RowGroupSource
    functions: tuple[Transform, ...]
    """The functions over rows, before the shuffle."""
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
    order, history, reading = config.order, config.history, config.reading
    others, transform_spec = split_transform_spec(config.transforms)
    own = transforms_of(others)
    over_rows = tuple(one for one in own if one.gives)
    table = table_of(
        config.source,
        config.roles,
        config.allow_code,
        config.hash,
        config.spec,
        version=config.version,
        transform_spec=transform_spec,
        functions=over_rows,
    )
    code = {transform.name: transform.code for transform in own}
    reading = replace(reading, files=reading.files or FileOpener())
    files = table.files_of(config.split)
    if transform_spec is not None:
        reading = replace(
            reading, petastorm=replace(reading.petastorm, transform_spec=transform_spec)
        )
        code = {"TransformSpec": address_of(transform_spec.func), **code}
    given = given_by(over_rows)
    fields = _fields(table, files, reading, given)
    layout = table.fingerprint.layout
    if transform_spec or given:
        layout = Fingerprint.of(fields).layout
    _refuse_with_petastorm(order, history, [*reading.petastorm.asked_for, *given])
    operators = Operators(fields, table.state() if any(field.online for field in fields) else None)
    columns = _columns(table, fields, config.fill, operators, reading.petastorm)
    made: MadeColumns | OperatorColumns | None = operators.made(columns)
    if isinstance(table, ParquetFiles):
        made = table.made(config.split, columns.names)
    histories = histories_of(history, table, config.split, columns, operators)
    groups = _row_groups(config, table, files, columns, made, reading, histories, over_rows)
    chances = groups.chances() if order.sample is not None else ()
    rows = source_of(reading.reader, groups, replace(reading.petastorm, transform_spec=None))
    transforms = [one for one in own if not one.gives]
    if table.transforms:
        # This needs torch, which remote workers do not import.
        from sluice.ingest.column_transforms import bound

        transforms = [*bound(table.transforms, table.stored, table.permission), *transforms]
    return LoaderInput(
        config=config,
        table=table,
        reading=reading,
        layout=digest([layout, asdict(history)]) if history else layout,
        columns=histories.columns if histories else columns,
        groups=groups,
        rows=rows,
        functions=groups.functions,
        plan=RowsPlan.of(
            order, rows.row_groups, chances, batch_size=config.batch_size, seed=config.seed
        ),
        transforms=transforms,
        code=code,
    )


def _fields(
    table: FeatureTable | ParquetFiles,
    files: Sequence[DataFile],
    reading: Reading,
    given: Mapping[str, pa.DataType],
) -> tuple[Field, ...]:
    """Returns the table's columns after a TransformSpec, with those that functions over rows give."""
    fields = table.fields
    if isinstance(table, ParquetFiles):  # was opened with both
        return fields
    if spec := reading.petastorm.transform_spec:
        assert reading.files
        fields = fields_after(fields, first_schema(files, reading.files), spec)
    return fields_with(fields, given) if given else fields


def _refuse_with_petastorm(order: Order, history: History | None, changes: Sequence[str]) -> None:
    """Raises LoaderError for what reads rows as they are stored, if Petastorm's Reader or a function changes them."""
    asked_for = ", ".join(changes)
    if order.sample is not None and asked_for:
        raise LoaderError(
            f"sample={order.sample!r} with {asked_for}: rows are sampled as they are "
            "stored. Make a column with the weights of the remaining rows, and sample by that column"
        )
    if history is not None and asked_for:
        raise LoaderError(
            f"history with {asked_for}: events are read as they are stored. Write the rows that you want as "
            "files, or leave one of the two out"
        )


def _columns(
    table: FeatureTable | ParquetFiles,
    fields: Sequence[Field],
    fill: Mapping[str, float] | float | None,
    operators: Operators,
    petastorm: PetastormOptions,
) -> Columns:
    if not isinstance(table, ParquetFiles):
        return operators.filled(Columns.of(fields, fill))
    columns = operators.filled(Columns.of(fields, fill, table.bags, table.fill))
    if not petastorm.asked_for:  # Petastorm may change values and skip rows
        table.check(columns)
    return columns


def _row_groups(  # noqa: PLR0917 # called once
    config: LoaderConfig,
    table: FeatureTable | ParquetFiles,
    files: Sequence[DataFile],
    columns: Columns,
    made: MadeColumns | OperatorColumns | None,
    reading: Reading,
    histories: UserHistories | None,
    functions: Sequence[Transform],
) -> RowGroupReader:
    names: Sequence[str] = made.sources if made else columns.names
    located = located_of(table)
    petastorm, opener = reading.petastorm, reading.files
    if opener is not None and (petastorm.transform_spec or petastorm.predicate):
        stored = first_schema(files, opener, located)
        functions = (
            *spec_functions(petastorm, needed_before(names, functions), stored),
            *functions,
        )
        check_filters(petastorm, stored)
    groups = RowGroupReader(
        files,
        names,
        opener,
        bags=columns.bags,
        sample=config.order.sample,
        is_filtered=petastorm.predicate is not None,
        filters=filters_of(petastorm),
        made=made,
        located=located,
        in_pages=True,
        history=histories,
        ids=columns.foreign_ids,
        functions=functions,
    )
    if groups.in_pages:
        load_compiled()  # before the memory in use is measured
    return groups
