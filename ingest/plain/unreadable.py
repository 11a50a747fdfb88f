"""Values that are there but that a spec's operators cannot read, as times of another format: `unreadable`.

A fill hides them in batches. A job judges them by the version before; a loader of plain files has none, and looks at
the first rows of its first and its last file.
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

_ROWS = 10_000  # of a file that are looked at
_SAID = 0.05  # the share from which on it is said, as a job says it of a table's first version
_REFUSED = 0.5  # above it the column says nothing: most likely its format is another
_SHOWN = 100  # how many characters of a value are quoted


def unreadable(recipes: Sequence[Recipe], paths: Sequence[str]) -> Iterator[str]:
    """Yields a sentence for each column of which many values cannot be read; ColumnError if it is most of them."""
    wanted = [recipe for recipe in recipes if reading(recipe.operators)]
    for path in dict.fromkeys((paths[0], paths[-1])) if wanted else ():
        rows = _first_rows(
            path, list(dict.fromkeys(name for recipe in wanted for name in recipe.sources))
        )
        for recipe in wanted:
            if not rows.num_rows or not set(recipe.sources) <= set(rows.column_names):
                continue  # optional, and not in this file
            share, example = _share(recipe, rows)
            if share < _SAID:
                continue
            text = (
                f"{path}: column {recipe.name!r}: {share:.1%} of its values cannot be read (first {rows.num_rows:,}"
                f" rows), for instance {example!r}"
            )
            if share > _REFUSED:
                raise ColumnError(
                    f"{text}; let the spec read it (a format may be several), or leave the column out"
                )
            yield f"warning: {text}; they count as missing"


def _first_rows(path: str, names: list[str]) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(
            _ROWS, columns=names, use_threads=False
        ):  # one ends with its row group
            batches.append(batch)
            if sum(one.num_rows for one in batches) >= _ROWS:
                break
    return flattened(pa.Table.from_batches(batches).slice(0, _ROWS)) if batches else pa.table({})


def _share(recipe: Recipe, rows: pa.Table) -> tuple[float, str]:
    """The share of the values that are there which cannot be read, and the first of these."""
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
