"""`FileWriter`: writes the data files of one job."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.etl.apply.features import FileAssignment
from sluice.etl.apply.sorted_rows import SortedRows
from sluice.etl.table.data_files import arrow_schema, folder_of, with_dictionaries
from sluice.etl.table.new_files import NewFile, describe
from sluice.etl.table.store import TableStore

_MOST_SHARE = 0.9
_MOST_DICTIONARY_BYTES = 2**30
"""Above this, Arrow would store the rest of a column chunk as values. The first rows have decided that already."""
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
        """Writes a file's rows in row groups of an exact size, in the layout of the table, with a checksum for each
        page. Reads the file again to check it."""
        spec = self.placement.spec
        fields = spec.fields({})
        schema, group = arrow_schema(fields), spec.table.row_group_rows
        relative = self.path(file, attempt)
        path = self.store.path(relative)
        self.store.fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
        pieces = (piece.select(schema.names).cast(schema) for piece in rows.pieces(group))
        first = next(pieces, schema.empty_table())
        with (
            self.store.fs.open_output_stream(path) as sink,
            pq.ParquetWriter(
                sink,
                schema,
                write_page_checksum=True,
                store_schema=False,
                **_layout(first, speed=spec.table.layout == "speed"),
            ) as writer,
        ):
            for piece in chain([first] if len(first) else [], pieces):
                self.check_wanted()
                writer.write_table(piece, row_group_size=group)
        self.check_wanted()
        # The number of ids of each column for values outside its vocabulary.
        buckets = {c.name: op.oov for c in spec.columns for op in c.ops if hasattr(op, "oov")}
        return describe(self.store, relative, fields, group, buckets)


def _layout(first: pa.Table, *, speed: bool) -> dict[str, Any]:
    """Returns the options by which a file with these first rows is written.

    For `speed`, nothing is compressed, and numbers have a dictionary where indices and dictionary take fewer bytes."""
    texts = with_dictionaries(first.schema)  # the loader's operators then see each value once
    if not speed:
        return {"compression": "lz4", "use_dictionary": texts}
    return {
        "compression": "none",
        "use_dictionary": [
            *texts,
            *(name for name in first.column_names if _is_repetitive(first.column(name))),
        ],
        "dictionary_pagesize_limit": _MOST_DICTIONARY_BYTES,
    }


def _is_repetitive(column: pa.ChunkedArray) -> bool:
    """Whether a dictionary shrinks a column of numbers to less than _MOST_SHARE of its bytes."""
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return False
    width = max(4, column.type.bit_width // 8)  # of the values that Parquet stores
    distinct = pc.count_distinct(column).as_py()
    bits = max(1, distinct - 1).bit_length()
    return bool(len(column) * bits / 8 + distinct * width < _MOST_SHARE * len(column) * width)
