"""Tables with a spec and fitted state, made without Spark: features by the job's own code, all rows at once."""

import datetime
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sluice import FeatureTable
from sluice.etl.table.new_files import write_file
from sluice.etl.table.store import folder_of
from tests.product import (
    Base,
    Categorify,
    Clicks,
    Features,
    FittedState,
    JobRecord,
    Profile,
    Sketch,
    Spec,
    TableStore,
    arrow_schema,
    cardinalities,
    new_job,
    publish,
    row_keys,
    under_rule,
)

COLUMNS = {
    "label": "int",
    "number": "int",
    "I1": "int",
    "I2": "int",
    "I5": "float",
    "C1": "text",
    "C5": "text",
    "C9": "text",
    "C14": "text",
    "tags": "texts",
}
FEATURES = """
[[column]]
name = "label"
role = "label"

[[column]]
name = "number"
role = "dense"
ops = [{op = "fill", value = 0}, {op = "log", shift = 1}]

[[column]]
name = "I1"
role = "dense"
ops = [{op = "fill", value = 0}, {op = "clip", low = -2}, {op = "log", shift = 3}]

[[column]]
name = "I2"
role = "dense"
ops = [{op = "fill", value = 0}, {op = "clip", low = -2, online = true}, {op = "log", shift = 3, online = true}]

[[column]]
name = "I5"
role = "dense"
ops = [{op = "fill", value = 0}, {op = "standardise", online = true}]

[[column]]
match = "C*"
role = "sparse"
ops = [{op = "categorify", min_count = 2, oov = 4}]

[[column]]
name = "tags"
role = "id_list"
ops = [{op = "categorify", min_count = 2}]
"""


def spec_text(columns: dict[str, str] | None = None, features: str = FEATURES) -> str:
    names = ", ".join(f'"{name}:{kind}"' for name, kind in (columns or COLUMNS).items())
    return f'[input]\nformat = "json"\ncolumns = [{names}]\n\n[table]\nrow_group_rows = 512\n{features}'


def raw_rows(rows: int, first: int = 0) -> pa.Table:
    """Raw clicks, some cells empty; `number` is each row's own."""
    clicks = Clicks(0).rows(first, rows)
    none = np.zeros(rows, bool)
    columns: dict[str, Any] = {
        "label": pa.array(clicks.label, pa.int64()),
        "number": pa.array(range(first, first + rows)),
    }
    for name in ("I1", "I2"):
        columns[name] = pa.array(clicks.counts[name], mask=clicks.nulls.get(name, none))
    columns["I5"] = pa.array(clicks.counts["I5"].astype(np.float64), mask=clicks.nulls["I5"])
    for name in ("C1", "C5", "C9", "C14"):
        text = pa.array([f"{code:08x}" for code in clicks.codes(name).tolist()])
        columns[name] = pa.array(text.to_pylist(), mask=clicks.nulls.get(name, none))
    counts = clicks.counts["I2"] % 4
    columns["tags"] = pa.array(
        [[f"t{n * 7 % 40}" for n in range(count)] for count in np.maximum(counts, 0).tolist()]
    )
    return pa.table(columns)


def columns_of(raw: pa.Table) -> dict[str, pa.Array]:
    """The columns of raw rows, as operators take them."""
    return {name: raw[name].combine_chunks() for name in raw.column_names}


def numbers_of(feature: Any) -> list[int]:
    """The numbers of rows, from a tensor of their feature."""
    return feature.double().expm1().round().long().tolist()


def fitted(
    spec: Spec, columns: dict[str, pa.Array], before: FittedState | None = None
) -> FittedState:
    """What Spark's fit gives for operators that count values, of these rows: here in plain Python."""
    tables = {}
    plain = Features(spec, FittedState())
    for learned in spec.fitted:
        counts: Counter[str] = Counter()
        for column, number in learned.users:
            names, amounts = learned.op.count(_until(plain, column, number, columns))
            for name, amount in zip(names.to_pylist(), amounts.to_pylist(), strict=True):
                counts[name] += amount
        kept = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        if isinstance(learned.op, Categorify):
            kept = [pair for pair in kept if pair[1] >= learned.op.min_count]
        table = learned.op.learn(
            pa.table(
                {
                    "value": pa.array([v for v, _ in kept], pa.string()),
                    "count": pa.array([n for _, n in kept], pa.int64()),
                    "place": pa.array(range(1, len(kept) + 1), pa.int32()),
                }
            )
        )
        old = before.tables.get(learned.key) if before is not None else None
        tables[learned.key] = table if old is None else learned.op.update(old, table)
    return FittedState(spec=spec.fitted_hash, tables=tables, chains=spec.chains, fitted_on="train")


def _until(plain: Features, column: Any, number: int, columns: dict[str, pa.Array]) -> pa.Array:
    values = plain.run(column, column.ops[:number], columns, {})
    if pa.types.is_list(values.type):
        values = values.flatten()
    kind = pa.string() if "text" in column.ops[number].takes else pa.float64()
    return values.cast(kind)


def write(
    path: Path, raw: pa.Table, *, text: str | None = None, mode: str = "create"
) -> FeatureTable:
    """Publishes the rows as a new version. What the version before had learned keeps its ids, and new values follow."""
    store, job = TableStore(path), new_job()
    base = Base.read(store)
    parent = FeatureTable.open(store.uri) if base.version is not None else None
    before = parent.state() if parent else None
    spec, _ = under_rule(
        Spec.own(text or spec_text()), parent.record if parent else None, accept=False
    )
    columns = columns_of(raw.select(spec.input.columns))
    rows = raw.num_rows
    first, second = rows * 8 // 10, rows * 9 // 10
    state = fitted(spec, {name: values[:first] for name, values in columns.items()}, before)
    state.save(store)
    keys = row_keys(columns, spec)
    features = Features(spec, state)
    made = pa.table(features.apply(columns, features.extras(columns, keys)))
    sizes, lists = cardinalities(spec, state), [c for c in spec.columns if c.role == "id_list"]
    bags = {c.name: _bag(columns[c.sources[0]]) for c in lists}
    fields = spec.fields(sizes, bags)
    made = made.cast(arrow_schema(fields))
    sketches, made_files, group = {}, [], spec.table.row_group_rows
    for split, start, stop in (
        ("train", 0, first),
        ("validation", first, second),
        ("test", second, rows),
    ):
        sketches[split] = Sketch.of(keys[start:stop]).to_json()
        groups = (made[first : min(stop, first + group)] for first in range(start, stop, group))
        target = f"{folder_of(job)}/split={split}/part-00000.parquet"
        made_files.append(write_file(store, target, groups, fields, split=split))
    written = tuple(file.record for file in made_files)
    profile = Profile.joined(file.profile for file in made_files)
    record = JobRecord(
        job=job,
        mode=mode,
        version=base.next,
        at=f"{datetime.datetime.now(datetime.UTC):%FT%TZ}",
        rows=rows,
        state=state.hash,
        parent=before.hash if before else None,
        spec=spec.text,
        seed=0,
        files=written,
        cardinalities=sizes,
        bags=bags,
        profile=profile.columns,
        identity=spec.rule,
        sketches={spec.rule.recognition: sketches},
    )
    return FeatureTable.open(store.uri, publish(store, base, record, fields))


def _bag(lists: pa.Array) -> tuple[int, float, int]:
    lengths = [len(items or ()) for items in lists.to_pylist()]
    return min(lengths), sum(lengths) / len(lengths), max(lengths)
