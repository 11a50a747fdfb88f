"""`FileWriter`: writes the data files of one job."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow.parquet as pq

from sluice.etl.apply.features import FileAssignment
from sluice.etl.apply.sorted_rows import SortedRows
from sluice.etl.table.data_files import arrow_schema, folder_of, with_dictionaries
from sluice.etl.table.new_files import NewFile, describe
from sluice.etl.table.store import TableStore

_ESCAPED = re.compile(r"[\x01-\x1f\x7f\"#%'*/:=?\\{\[\]^]")
"""The characters that Hive and Spark escape in a folder's name."""


@dataclass(frozen=True)
class FileWriter:
    """Writes the files of one job, on every engine."""

    placement: FileAssignment
    store: TableStore
    job: str
    check_wanted: Callable[[], None] = lambda: None
    """Is called between short steps. It raises an error if the job has ended."""

    def path(self, file: int, attempt: int | None = None) -> str:
        """Returns the path of a file. If several attempts may write it, each has a path of its own."""
        ends = zip(self.placement.spec.table.split, self.placement.ends, strict=True)
        folder = f"{folder_of(self.job)}/split={next(split for split, end in ends if file < end)}"
        if self.placement.pairs:
            value = _ESCAPED.sub(
                lambda found: f"%{ord(found[0]):02X}", self.placement.partitions[file]
            )
            folder += f"/partition={value}"
        suffix = "" if attempt is None else f"-{attempt}"
        return f"{folder}/part-{file:05}{suffix}.parquet"

    def write(self, file: int, rows: SortedRows, attempt: int | None = None) -> NewFile:
        """Writes a file's rows in row groups of an exact size, with the codec and the encodings that decode fastest,
        and a checksum for each page. Reads the file again to check it."""
        spec = self.placement.spec
        fields = spec.fields({})
        schema, group = arrow_schema(fields), spec.table.row_group_rows
        relative = self.path(file, attempt)
        path = self.store.path(relative)
        self.store.fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with (
            self.store.fs.open_output_stream(path) as sink,
            pq.ParquetWriter(
                sink,
                schema,
                compression="lz4",
                # Texts have a dictionary, so that the loader's operators see each value once.
                use_dictionary=with_dictionaries(schema),
                write_page_checksum=True,
                store_schema=False,
            ) as writer,
        ):
            for piece in rows.pieces(group):
                self.check_wanted()
                writer.write_table(piece.select(schema.names).cast(schema), row_group_size=group)
        self.check_wanted()
        # The number of ids of each column for values outside its vocabulary.
        buckets = {c.name: op.oov for c in spec.columns for op in c.ops if hasattr(op, "oov")}
        return describe(self.store, relative, fields, group, buckets)
