"""Makes the features of the Criteo spec with pandas, Polars or DuckDB, in one process.

    python -m benchmarks.etl_arms ARM RAW OUT

Each program makes the features of features/criteo.toml:

* logarithms of 13 counts;
* vocabularies of 23 columns: values seen four times or more, by falling count and then by value, get ids from 10 on, a
  missing value gets 1, and other values get 2 to 9 by hash;
* three hashed columns;
* rows in random order, in three splits of Parquet files with lz4 row groups of 32,768 rows.

Each program is written as its documentation advises. Their vocabularies are learned from all rows, while the ETL job
learns only from the training split. None of them hashes whole rows, checks its files, keeps rejects or publishes a
table. The last line is JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

INTEGERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
NAMES = ["label", *INTEGERS, *CATEGORIES]
HASHED = {"C3": 100_000, "C12": 100_000, "C21": 50_000}
SPLITS = {"train": 0.8, "validation": 0.1, "test": 0.1}
LEAST, OOV, FIRST, GROUP = 4, 8, 10, 32_768


def bounds(rows: int) -> list[tuple[str, int, int]]:
    """Returns the name, the first row and the end of each split."""
    train, validation = round(rows * SPLITS["train"]), round(rows * SPLITS["validation"])
    return [
        ("train", 0, train),
        ("validation", train, train + validation),
        ("test", train + validation, rows),
    ]


def with_pandas(raw: Path, out: Path) -> None:
    import numpy as np
    import pandas as pd

    types = {
        **dict.fromkeys(INTEGERS, "int64[pyarrow]"),
        **dict.fromkeys(CATEGORIES, "string[pyarrow]"),
    }
    frame = pd.read_csv(
        raw, sep="\t", names=NAMES, engine="pyarrow", dtype_backend="pyarrow", dtype=types
    )
    made: dict[str, Any] = {"label": frame["label"].to_numpy(dtype="int8")}
    for n in INTEGERS:
        filled = frame.pop(n).fillna(0).to_numpy(dtype="float64")
        made[n] = np.log(np.maximum(filled, -2) + 3).astype("float32")
    for n in CATEGORIES:
        codes, values = pd.factorize(frame.pop(n))
        hashed = pd.util.hash_array(values.to_numpy(dtype=object))
        if n in HASHED:
            ids = (hashed % HASHED[n] + 2).astype("int32")
        else:
            counts = np.bincount(codes[codes >= 0], minlength=len(values))
            kept = pd.DataFrame(
                {"count": -counts, "value": values, "code": np.arange(len(values))}
            )[counts >= LEAST]
            ids = (hashed % OOV + 2).astype("int32")
            kept = kept.sort_values(["count", "value"])
            ids[kept["code"].to_numpy()] = np.arange(FIRST, FIRST + len(kept))
        made[n] = np.append(ids, np.int32(1))[codes]  # a missing value has code -1: the last
    whole = pd.DataFrame(made, copy=False).take(np.random.default_rng(1).permutation(len(frame)))
    for name, start, end in bounds(len(frame)):
        whole.iloc[start:end].to_parquet(
            out / f"{name}.parquet",
            compression="lz4",
            index=False,
            row_group_size=GROUP,
            use_dictionary=False,
        )


def with_polars(raw: Path, out: Path) -> None:
    import polars as pl

    schema = {
        "label": pl.Int8,
        **dict.fromkeys(INTEGERS, pl.Int64),
        **dict.fromkeys(CATEGORIES, pl.String),
    }
    frame = pl.read_csv(raw, separator="\t", has_header=False, schema=schema)
    lazy = frame.lazy()
    fitted = [n for n in CATEGORIES if n not in HASHED]
    vocabularies = pl.collect_all(
        [
            lazy.group_by(n)
            .len()
            .filter(pl.col(n).is_not_null() & (pl.col("len") >= LEAST))
            .sort(["len", n], descending=[True, False])
            .select(n, id=pl.int_range(FIRST, FIRST + pl.len(), dtype=pl.Int32))
            for n in fitted
        ]
    )
    made = [
        lazy.select(
            "label",
            *[
                (pl.col(n).fill_null(0).clip(lower_bound=-2) + 3).log().cast(pl.Float32)
                for n in INTEGERS
            ],
            *[
                pl.when(pl.col(n).is_null())
                .then(1)
                .otherwise(pl.col(n).hash() % size + 2)
                .cast(pl.Int32)
                .alias(n)
                for n, size in HASHED.items()
            ],
        )
    ]
    for n, vocabulary in zip(fitted, vocabularies, strict=True):
        known = lazy.select(n).join(vocabulary.lazy(), on=n, how="left", maintain_order="left")
        made.append(
            known.select(
                pl.when(pl.col(n).is_null())
                .then(1)
                .otherwise(pl.coalesce("id", pl.col(n).hash() % OOV + 2))
                .cast(pl.Int32)
                .alias(n)
            )
        )
    whole = pl.concat(pl.collect_all(made), how="horizontal").select(NAMES)
    del frame, lazy
    rows = len(whole)
    whole = whole.sample(fraction=1.0, shuffle=True, seed=1)
    for name, start, end in bounds(rows):
        whole.slice(start, end - start).write_parquet(
            out / f"{name}.parquet", compression="lz4", row_group_size=GROUP
        )


def with_duckdb(raw: Path, out: Path) -> None:
    import duckdb

    types = {
        "label": "TINYINT",
        **dict.fromkeys(INTEGERS, "BIGINT"),
        **dict.fromkeys(CATEGORIES, "VARCHAR"),
    }
    db = duckdb.connect(
        config={"temp_directory": str(out / "spilled"), "preserve_insertion_order": False}
    )
    db.execute(
        f"create table raw as from read_csv('{raw}', delim='\t', header=false, quote='', columns={types})"
    )
    made, joins = (
        ["label", *[f"ln(greatest(coalesce({n}, 0), -2) + 3)::float as {n}" for n in INTEGERS]],
        [],
    )
    for n in CATEGORIES:
        if n in HASHED:
            made.append(f"if(raw.{n} is null, 1, hash(raw.{n}) % {HASHED[n]} + 2)::int as {n}")
            continue
        place = f"row_number() over (order by count(*) desc, {n})"
        db.execute(
            f"create temp table v_{n} as select {n}, ({place} + {FIRST - 1})::int as id from raw "
            f"where {n} is not null group by {n} having count(*) >= {LEAST}"
        )
        made.append(
            f"if(raw.{n} is null, 1, coalesce(v_{n}.id, hash(raw.{n}) % {OOV} + 2))::int as {n}"
        )
        joins.append(f"left join v_{n} on raw.{n} = v_{n}.{n}")
    db.execute(
        f"create temp table made as select {', '.join(made)}, hash(raw.rowid) as place "
        f"from raw {' '.join(joins)}"
    )
    low = 0.0
    for name, share in SPLITS.items():
        high = low + share
        where = f"place >= {int(low * 2**64)} and place < {min(2**64 - 1, int(high * 2**64))}"
        db.execute(
            f"copy (select {', '.join(NAMES)} from made where {where} order by place) to '{out / name}.parquet' "
            f"(format parquet, compression lz4_raw, row_group_size {GROUP})"
        )
        low = high


ARMS: dict[str, Callable[[Path, Path], None]] = {
    "pandas": with_pandas,
    "polars": with_polars,
    "duckdb": with_duckdb,
}


def content(folder: Path) -> dict[str, int]:
    """Returns a summary that does not depend on the order of rows: rows, clicks, dense sums, ids outside
    vocabularies."""
    import numpy as np
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    sums: Counter[str] = Counter()
    for batch in ds.dataset(
        [str(p) for p in folder.rglob("*.parquet")], format="parquet"
    ).to_batches():
        sums["rows"] += batch.num_rows
        sums["clicks"] += pc.sum(batch["label"].cast("int64")).as_py()
        for n in CATEGORIES:
            ids = batch[n].to_numpy().astype(np.int64)
            sums["missing"] += int((ids == 1).sum())
            if n not in HASHED:
                sums["known"] += int((ids >= FIRST).sum())
                sums["ids"] += int(ids[ids >= FIRST].sum())
        for n in INTEGERS:
            sums["dense"] += int(np.rint(batch[n].to_numpy().astype(np.float64) * 1000).sum())
    return dict(sums)


def main(argv: list[str]) -> dict[str, Any]:
    arm, raw, out = argv[0], Path(argv[1]), Path(argv[2])
    start = time.perf_counter()
    ARMS[arm](raw, out)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "content": content(out),
        "seconds": round(seconds, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": used.ru_maxrss // 1024,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
