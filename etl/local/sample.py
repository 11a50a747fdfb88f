"""Reads rows of an input without a job. `cut_sample` writes the first rows to files, to predict a job's time.
`numbered_rows` reads all rows with their files and lines."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.etl.apply.input_checks import headers_of
from sluice.etl.apply.parse import InputParser
from sluice.etl.local.input import LocalInput
from sluice.etl.local.threads import Threads
from sluice.etl.read.input_paths import files_of
from sluice.etl.read.pieces import PIECE_BYTES, pieces_of
from sluice.etl.spec.input_section import Input
from sluice.etl.spec.spec import Spec


def numbered_rows(spec: Spec, paths: tuple[str, ...], file: str, line: str) -> pa.Table:
    """Returns all rows of an input that parse, in order, with two more columns: the file of each row, and its line
    there (in formats without lines, its number)."""
    headers = tuple(header.encode(spec.input.encoding) for header in headers_of(spec.input))
    parser, tables = InputParser(spec), list[pa.Table]()
    places, total = list[np.ndarray](), 0
    seen = Counter[str]()
    with contextlib.closing(Threads(1)) as threads:
        source = LocalInput(spec.input, paths, threads)
        source.check()
        for piece in source.pieces():
            name = piece.file.name
            for batch in piece.batches(headers):
                parsed = parser.parse(batch)
                good = np.delete(
                    np.arange(batch.num_rows), [number for number, _ in parsed.rejected]
                )
                first_line = seen[name] + (2 if spec.input.header else 1)
                lines = good + first_line
                names = pa.array([name]).take(pa.array(np.zeros(len(good), np.int64)))
                tables.append(pa.table({**parsed.columns, file: names, line: lines}))
                places.append(good + total)
                seen[name] += batch.num_rows
                total += batch.num_rows
    found = pa.concat_tables(tables)
    if spec.input.place:
        found = found.append_column(spec.input.place, pa.array(np.concatenate(places) / total))
    return found.combine_chunks()


def cut_sample(
    source: Input, paths: tuple[str, ...], folder: Path, rows: int, parts: int
) -> tuple[int, float] | None:
    """Writes about `rows` rows to `parts` files. Returns the number of rows, and their share of the input's bytes.
    Returns None for a table, which has values outside its files."""
    if source.is_table:
        return None
    files = files_of(paths)
    total = max(1, sum(file.size for file in files))
    if source.format == "parquet":
        with files[0].open() as stream:
            reader = pq.ParquetFile(stream)
            table = pa.Table.from_batches([next(reader.iter_batches(rows))], reader.schema_arrow)
            share = files[0].size / total * table.num_rows / max(1, reader.metadata.num_rows)
        for number in range(parts):
            step = -(-table.num_rows // parts)
            pq.write_table(table.slice(number * step, step), folder / f"{number}.parquet")
        return table.num_rows, share
    piece = next(pieces_of(files, PIECE_BYTES))
    lines = pa.table(next(piece.batches(()))).column("line").chunk(0)
    some = lines.slice(0, rows)
    share = piece.size / total * len(some) / len(lines)
    header = lines[0].as_py() if source.header else b""
    for number in range(parts):
        step = -(-len(some) // parts)
        (folder / f"{number}.txt").write_bytes(
            (header if number else b"") + b"".join(some.slice(number * step, step).to_pylist())
        )
    return len(some), share
