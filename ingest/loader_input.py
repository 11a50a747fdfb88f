"""Opens what a loader reads: `LoaderInput`, a split of a table with its columns and the functions over its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sluice.etl.schema import Fingerprint
from sluice.etl.spec.permission import Permission
from sluice.ingest.column_transforms import bound
from sluice.ingest.columns import Columns
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.packed_copy import PackedCopy
from sluice.ingest.read.parquet_files import ParquetFiles, table_of
from sluice.ingest.read.petastorm.options import PetastormOptions, reshaped, without_spec
from sluice.ingest.read.reader import RowGroupReader, first_schema
from sluice.ingest.row_order import Read
from sluice.ingest.stages.table_operators import Operators
from sluice.ingest.stages.transform import UserTransform, address_of, transforms_of

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.read.parquet_files import Paths, Roles


class LoaderInput:
    """A split of a table. Making it opens no row group."""

    def __init__(
        self,
        source: FeatureTable | ParquetFiles | Paths,
        *,
        split: str,
        transforms: Iterable[UserTransform],
        roles: Roles | None,
        fill: Mapping[str, float] | float | None,
        files: FileOpener | None,
        petastorm: PetastormOptions,
        allow_code: Permission | Iterable[str],
    ):
        transforms, transform_spec = without_spec(transforms)
        table = table_of(source, roles, allow_code, transform_spec=transform_spec)
        plain = table if isinstance(table, ParquetFiles) else None
        given = transforms_of(transforms)
        self.code = {t.name: t.code for t in given}
        """Maps each of the user's functions to `module:function`, or to None if it has no such name."""
        self.table = table
        self._split = split
        self._stored = table.files_of(split)
        self._files = files or FileOpener()
        fields = table.fields
        if transform_spec is None:
            self.layout = table.fingerprint.layout
        else:
            petastorm = replace(petastorm, transform_spec=transform_spec)
            self.code = {"TransformSpec": address_of(transform_spec.func), **self.code}
            if plain is None:
                fields = reshaped(fields, first_schema(self._stored, self._files), transform_spec)
            self.layout = Fingerprint.of(fields).layout
        self.petastorm = petastorm
        spec = "" if isinstance(table, ParquetFiles) or not table.records else table.record.spec
        state = table.state() if any(f.online for f in fields) else None
        self.operators = Operators(fields, state, spec)
        left = bound(table.transforms, table.stored, table.permission)
        self.transforms = [*left, *given]
        """The table's functions, then the user's."""
        lists = (plain.bags, plain.fill) if plain else ()
        self.columns = self.operators.filled(Columns.of(fields, fill, *lists))
        if plain and not petastorm.asked_for:  # which may change values, and leave rows out
            plain.check(self.columns)
        self._plain = plain
        self.plain = plain if petastorm.transform_spec is None else None
        """The plain files whose footers tell how large ids are, if no function edits the ids."""

    @property
    def stored_bytes(self) -> float:
        """The average size of a row in the table's files, in bytes."""
        return sum(f.bytes for f in self._stored) / max(1, sum(f.rows for f in self._stored))

    def row_groups(
        self,
        *,
        sample: str | None,
        packed: PackedCopy | None,
        before_read: Callable[[Read], None] | None,
    ) -> RowGroupReader:
        """Makes the reader of the split's row groups. Closing it closes the opener of files too."""
        columns = self.columns
        made = (
            self._plain.made(self._split, columns.names)
            if self._plain
            else self.operators.made(columns)
        )
        names: Sequence[str] = made.sources if made else columns.names
        given = None
        if self.petastorm.transform_spec is not None or self.petastorm.predicate is not None:
            names, given = self.petastorm.columns(names, first_schema(self._stored, self._files))
        return RowGroupReader(
            self._stored,
            names,
            before_read,
            self._files,
            bags=columns.bags,
            sample=sample,
            given=given,
            made=made,
            packed=packed,
        )
