"""`open_table` opens the table that a run trains on: a feature table, or with a spec the table or files of another
program (`ForeignTable`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pyarrow as pa

from sluice.etl.schema import Field
from sluice.etl.spec.permission import NOTHING, Permission
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.table_transform import short_transforms
from sluice.etl.table.table import FeatureTable, ForeignDelta, TableError
from sluice.etl.table.table_files import versioned
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.read.source_files import has_versions, is_table


@dataclass(frozen=True)
class ForeignTable(FeatureTable):
    """One version of a table that no Sluice job made. Its spec gives it columns and splits. It has no job records."""

    source: ParquetFiles = field(kw_only=True, compare=False)
    """What a loader of these rows takes."""


def open_table(
    data: str,
    version: int | None = None,
    *,
    spec: str = "",
    allow_code: Permission | Iterable[str] = NOTHING,
    transforms: Iterable[str] = (),
) -> FeatureTable:
    """Opens a version, by default the newest. `spec` is the text of a feature spec for a table of another program.

    The version of plain files is a hash of them. Raises TableError if the files have another one."""
    if spec:
        data, version = versioned(data, version)
    if not spec or is_table(data):
        try:
            return FeatureTable.open(data, version, allow_code=allow_code, transforms=transforms)
        except ForeignDelta:
            if not spec:
                raise
    permission = Permission.of(allow_code)
    source = ParquetFiles.open(
        data,
        spec=Spec.parse(spec, "--spec", permission),
        version=version if has_versions(data) else None,
        permission=permission,
    )
    source = source.transformed(short_transforms(transforms))
    current = int(source.version[:12], 16) if source.table is None else source.table.version
    if version not in (None, current):
        raise TableError(
            f"{data}: the files or the spec have changed: version {version} was asked for, and this is {current}. Put "
            "back what was there, or begin another run. To train on versions, use a Delta or Iceberg table"
        )
    return ForeignTable(
        uri=data if "://" in data else os.path.abspath(data),
        version=current,
        fields=_fields(source),
        files=tuple(
            replace(file, split=split)
            for split in source.splits
            for file in source.files_of(split, one_of_many=True)
        ),
        schema=pa.schema([]),
        records={},
        permission=source.permission,
        transforms=source.transforms,
        source=source,
    )


def _fields(source: ParquetFiles) -> tuple[Field, ...]:
    """Returns the columns with their numbers of ids, from the operators or else from the footers."""
    unsized = [
        field.name
        for field in source.fields
        if field.role in ("sparse", "id_list") and field.cardinality is None
    ]
    sizes = source.sizes(unsized)
    return tuple(
        replace(
            field,
            cardinality=sizes.get(field.name, field.cardinality),
            # A footer counts all ids of a column, and does not show the longest bag.
            bag=(0, source.bags[field.name], 0) if field.name in source.bags else None,
        )
        for field in source.fields
    )
