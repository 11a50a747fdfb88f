"""`numbered_rows` reads all rows of an input with their files and lines, without a job."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pyarrow as pa

from sluice.etl.apply.input_checks import headers_of
from sluice.etl.apply.parse import InputParser
from sluice.etl.local.input import LocalInput
from sluice.etl.local.threads import Threads
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
