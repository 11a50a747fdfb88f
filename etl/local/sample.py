"""The first rows of an input as an input of their own: `cut`, by which a job's time is told before it runs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.etl.local.input_paths import files_of
from sluice.etl.local.pieces import PIECE_BYTES, pieces_of
from sluice.etl.spec.spec import Input


def cut(source: Input, paths: tuple[str, ...], folder: Path, rows: int, parts: int) -> tuple[int, float] | None:
    """Writes about so many rows to `parts` files, and returns how many rows they are, and the share of the input's
    bytes that they come from; None of formats whose rows are not in files alone."""
    if source.format == "delta":
        return None
    files = files_of(paths)
    whole = max(1, sum(file.size for file in files))
    if source.format == "parquet":
        with files[0].open() as stream:
            reader = pq.ParquetFile(stream)
            table = pa.Table.from_batches([next(reader.iter_batches(rows))], reader.schema_arrow)
            share = files[0].size / whole * table.num_rows / max(1, reader.metadata.num_rows)
        for number in range(parts):
            step = -(-table.num_rows // parts)
            pq.write_table(table.slice(number * step, step), folder / f"{number}.parquet")
        return table.num_rows, share
    piece = next(pieces_of(files, PIECE_BYTES))
    lines = pa.table(next(piece.batches(()))).column("line").chunk(0)
    some = lines.slice(0, rows)
    share = piece.size / whole * len(some) / len(lines)
    head = lines[0].as_py() if source.header else b""
    for number in range(parts):
        step = -(-len(some) // parts)
        (folder / f"{number}.txt").write_bytes((head if number else b"") + b"".join(
            some.slice(number * step, step).to_pylist()))
    return len(some), share
