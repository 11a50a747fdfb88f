"""Finds values that a spec's operators cannot read, such as times in another format: `unreadable`.

In batches, a fill hides such values. A job compares with the table's previous version. A loader of plain files has no
previous version, so it checks the first rows of its first and its last file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sluice.etl.ops.chain import lacks, reading, step
from sluice.etl.spec.nested_columns import flattened, whole
from sluice.ingest.columns import ColumnError
from sluice.ingest.plain.recipe import Recipe, typed

_ROWS = 10_000  # rows of a file to check
_SAID = 0.05  # the share that causes a warning, as in a job for a table's first version
_REFUSED = 0.5  # above this share the column is rejected, because its format is probably wrong
_SHOWN = 100  # characters of a value to quote


def unreadable(recipes: Sequence[Recipe], paths: Sequence[str]) -> Iterator[str]:
    """Yields a warning for each column with many unreadable values. Raises ColumnError if most are unreadable."""
    wanted = [recipe for recipe in recipes if reading(recipe.operators)]
    for path in dict.fromkeys((paths[0], paths[-1])) if wanted else ():
        rows = _first_rows(
            path, list(dict.fromkeys(name for recipe in wanted for name in recipe.sources))
        )
        for recipe in wanted:
            if not rows.num_rows or not set(recipe.sources) <= set(rows.column_names):
                continue  # an optional column that this file lacks
            share, example = _share(recipe, rows)
            if share < _SAID:
                continue
            text = (
                f"{path}: column {recipe.name!r}: {share:.1%} of its values cannot be read (first {rows.num_rows:,}"
                f" rows), for instance {example!r}"
            )
            if share > _REFUSED:
                raise ColumnError(
                    f"{text}; correct the format in the spec (it may list several), or leave the column out"
                )
            yield f"warning: {text}; they count as missing"


def _first_rows(path: str, names: list[str]) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(
            _ROWS, columns=names, use_threads=False
        ):  # a batch does not cross row groups
            batches.append(batch)
            if sum(one.num_rows for one in batches) >= _ROWS:
                break
    return flattened(pa.Table.from_batches(batches).slice(0, _ROWS)) if batches else pa.table({})


def _share(recipe: Recipe, rows: pa.Table) -> tuple[float, str]:
    """Returns the unreadable share of the values that are not missing, and the first unreadable value."""
    stored = [whole(rows.column(name)) for name in recipe.sources]
    columns = [typed(*one) for one in zip(recipe.sources, stored, recipe.kinds, strict=True)]
    values = (
        columns[0]
        if len(columns) == 1
        else pa.StructArray.from_arrays(columns, list(recipe.sources))
    )
    for op in recipe.operators[: reading(recipe.operators)]:
        values = step(op, values, None, {})
    there = pc.invert(lacks(columns[0]))
    bad = pc.and_(there, lacks(values))
    count = pc.sum(bad).as_py() or 0
    example = str(stored[0].filter(bad)[0])[:_SHOWN] if count else ""
    return count / max(1, pc.sum(there).as_py() or 0), example
