"""Both engines make the same table of the same input: rows, files, order, states, records, schema and rejects."""

import decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from sluice import FeatureTable
from tests.etl.drawn_rows import draw_rows
from tests.etl.jobs import build_table
from tests.etl.tables import column, rejects_of, write_rows, write_spec
from tests.product import Spec, between, synthesize

pytestmark = pytest.mark.spark

FEATURES = Path(__file__).resolve().parents[3] / "features"
OTHERWISE = {"job", "at", "files", "engine"}
"""What of a record says who wrote it, when and where."""


def raw_of(name: str, text: str, folder: Path, seed: int) -> Path:
    path = folder / f"{name}-{seed}"
    if name in ("avazu", "wide"):
        draw_rows(path, text, rows=60 if name == "wide" else 1000, seed=seed)
        return path
    synthesize(path, rows=1000, seed=seed)
    lines = path.read_text().splitlines()
    lines[7] = "no click at all"
    lines[70] += "\t"
    lines[71] = lines[71].replace("\t", "\t\t", 1)
    path.write_bytes("\n".join(lines).encode() + b"\n1\t\xff\n")
    return path


def made(spark, text: str, inputs: list[Path], output: Path, **options: object) -> FeatureTable:
    nulls = tuple(Spec.own(text).input.columns)
    words = {"max_rejects": 0.1, "split_moved": "accept", "accept_nulls": nulls, **options}
    return build_table(spark, output, *inputs, text=text, **words)


def made_by_both(
    spark, text: str, inputs: list[Path], folder: Path, **options: object
) -> list[FeatureTable]:
    """The table of Spark and the table of the local engine."""
    return [
        made(engine, text, inputs, folder / where, **options)
        for engine, where in ((spark, "spark"), (None, "local"))
    ]


def bits(table: pa.Table) -> list[object]:
    """The columns so that NaN equals itself, and -0.0 does not equal 0.0."""
    return [
        column.combine_chunks()
        .to_numpy(zero_copy_only=False)
        .view(f"i{column.type.bit_width // 8}")
        .tolist()
        if pa.types.is_floating(column.type)
        else column.to_pylist()
        for column in table.columns
    ]


def rejects(table: FeatureTable) -> list[dict]:
    return sorted(rejects_of(table), key=lambda row: (row["file"], row.get("line", 0), row["raw"]))


def alike(table: FeatureTable, other: FeatureTable) -> None:
    assert table.fingerprint == other.fingerprint
    records = [
        {key: value for key, value in table.record.to_json().items() if key not in OTHERWISE}
        for table in (table, other)
    ]
    assert records[0] == records[1]
    assert DeltaTable(table.uri).schema().to_json() == DeltaTable(other.uri).schema().to_json()
    assert [(f.split, f.rows, f.row_group_rows) for f in table.files] == [
        (f.split, f.rows, f.row_group_rows) for f in other.files
    ]
    for mine, theirs in zip(table.files, other.files, strict=True):
        tables = [pq.read_table(f.path, partitioning=None) for f in (mine, theirs)]
        assert tables[0].schema.names == tables[1].schema.names
        assert bits(tables[0]) == bits(tables[1])
    assert rejects(table) == rejects(other)
    assert other.check() == []


@pytest.mark.parametrize("name", ["avazu", "criteo", "wide"])
def test_every_format_and_every_mode_make_the_same_table(spark, tmp_path, name):
    text = (FEATURES / f"{name}.toml").read_text()
    text = text.replace("F1..F900", "F1..F40").replace(
        "C1..C94", "C1..C6"
    )  # a thousand columns are a minute of Spark
    first, second = (raw_of(name, text, tmp_path, seed) for seed in (1, 2))
    steps = [("create", [first], {})]
    if name == "avazu":
        steps.append(("append", [second], {}))
    if name == "criteo":
        steps.append(("overwrite", [first, second], {"update_state": True}))
        steps.append(("overwrite", [second], {"refit": True}))
    for mode, inputs, options in steps:
        both = made_by_both(spark, text, inputs, tmp_path, mode=mode, **options)
        alike(*both)
    assert both[0].version == len(steps) - 1
    assert [table.record.engine for table in both] == ["spark", "local"]


ODD = write_spec(
    "click:int at:float since:int word:text place:text tags:texts price:float seen:float day:int "
    "cost:float codes:texts",
    column("at", "dense", "fill_mean; standardise"),
    column("since", "time"),
    column("word", "sparse", "categorify, oov = 2"),
    column("tags", "id_list", 'categorify, joint = "t"'),
    column("place", "key"),
    column("price", "dense", "fill_median, indicator = true; standardise"),
    column("seen", "time"),
    column("day", "sparse", "weekday; hash, size = 3000000000"),
    column("cost", "dense", "fill"),
    column("codes", "id_list", "hash, size = 4000000000"),
    table="seed = 3\nfile_rows = 60\nrow_group_rows = 16\nsplit = {train = 0.7, test = 0.3}\n%s",
)
WAYS = {
    "order": 'order = "at"\norder_step = 1\n[sample]\nnegatives = 0.7\nweight = "weight"',
    "together": 'together = "word"\nplain_lists = true\n[[filter]]\ncolumn = "word"\n'
    'op = "present"',
    "drawn": 'key = ["since"]\nsplit_by = ["word"]\n[negatives]\ncolumn = "word"\neach = 2',
}


@pytest.mark.parametrize("way", WAYS)
def test_odd_values_are_the_same_to_both(spark, tmp_path, way):
    """NaN, -0.0, infinities, nulls, texts in which bytes and characters differ in order, names that a path escapes;
    times with and without a zone, dates, decimals, lists of numbers."""
    draw = np.random.default_rng(8)

    def of(kind: pa.DataType, *values: object) -> pa.Array:
        return pa.array([values[n] for n in draw.integers(0, len(values), 400)], kind)

    table = pa.table(
        {
            "click": of(pa.int8(), 0, 1),
            "at": of(pa.float64(), *ODD_NUMBERS),
            "price": of(pa.float64(), *ODD_NUMBERS),
            "since": of(pa.timestamp("us", "UTC"), -1_500_000, 0, 999_999, 10**15 + 1, None),
            "word": of(pa.string(), "\U0001f600", "\uffee", "é", "e", "E", "", None, "a\x00"),
            "place": of(pa.string(), "a b/c%d", "x=1", "ü", "", None, "__HIVE"),
            "tags": of(pa.list_(pa.string()), [], ["a", None, "b"], None, ["\U0001f600", "\uffee"]),
            "seen": of(pa.timestamp("us"), -1_500_000, 0, 999_999, 10**15 + 1, None),
            "day": of(pa.date32(), -1, 0, 19_000, None),
            "codes": of(pa.list_(pa.int64()), [], [2**60, None, -1], None, [7]),
            "cost": of(
                pa.decimal128(9, 2), decimal.Decimal("-0.01"), decimal.Decimal("1234567.89"), None
            ),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=70)
    both = made_by_both(spark, ODD % WAYS[way], [tmp_path / "rows.parquet"], tmp_path)
    alike(*both)
    assert len(both[0].files) > 2


def test_names_with_dots_are_the_same_to_both(spark, tmp_path):
    rows = [{"click": n % 2, "device": None if n % 3 else {"os": f"s{n % 4}"}} for n in range(40)]
    path = write_rows(tmp_path / "rows.parquet", pa.Table.from_pylist(rows))
    text = write_spec(
        "click:int device.os:text",
        column("device.os", "sparse", "categorify"),
        table="split = {train = 1}",
    )
    both = made_by_both(spark, text, [path], tmp_path)
    alike(*both)
    assert {field.name: field.cardinality for field in both[1].fields}["device.os"] == 2 + 1 + 4


CLOSE = write_spec(
    "click:int at:float born:float few:int",
    column("part", "sparse", "quantiles, buckets = 10", "at"),
    column("later", "sparse", "quantiles, buckets = 5, online = true", "at"),
    column("born", "dense", "fill_median; standardise"),
    column("age", "sparse", "fill_median; quantiles, buckets = 4", "born"),
    column("few", "sparse", "quantiles, buckets = 3"),
    table="split = {train = 1}",
)
NEW = {"part", "later", "born", "age"}
"""The columns that 0.3.0 would learn otherwise."""
DAY = 86_400


def close_rows(path: Path, seed: int, rows: int = 3000) -> Path:
    """Clicks of one day, of people who were born in three years."""
    rng = np.random.default_rng(seed)
    born = -300_000_000.0 + DAY * rng.integers(0, 3 * 365, rows)
    columns = {
        "click": rng.integers(0, 2, rows),
        "at": 1_767_225_600.0 + rng.integers(0, DAY, rows),
        "born": pa.array(born, mask=rng.random(rows) < 0.1),
        "few": rng.integers(0, 7, rows),
    }
    return write_rows(path, pa.table(columns))


def test_close_numbers_are_learned_closely_and_the_same_by_both(spark, tmp_path):
    paths = [close_rows(tmp_path / f"{n}.parquet", n) for n in range(2)]
    alike(*made_by_both(spark, CLOSE, paths, tmp_path))
    table = FeatureTable.open(tmp_path / "local")
    assert {f.name for f in table.fields if f.values_rule > 1} == NEW
    ids = pa.concat_tables([pq.read_table(file.path) for file in table.files])
    assert np.bincount(ids["part"])[2:] == pytest.approx([600] * 10, rel=0.1)
    rows = pa.concat_tables([pq.read_table(path) for path in paths])
    exact = np.sort(rows["born"].drop_null().to_numpy())
    [median] = table.state()["born/0"][0].to_pylist()
    assert median == exact[(len(exact) - 1) // 2], "each day is a range of its own"


def test_a_table_with_ranges_of_0_3_0_keeps_them_and_one_made_anew_has_another_fingerprint(
    tmp_path, monkeypatch
):
    paths = [close_rows(tmp_path / f"{n}.parquet", n) for n in range(2)]
    with monkeypatch.context() as of_0_3_0:
        of_0_3_0.setattr("sluice.etl.ops.scaling.undecided", lambda counted, shares: None)
        old = made(None, CLOSE, paths[:1], tmp_path / "table")
    assert {f.values_rule for f in old.fields} == {1}
    grown = made(None, CLOSE, paths[1:], tmp_path / "table", mode="append")
    assert (grown.version, grown.fingerprint) == (1, old.fingerprint)
    assert grown.record.state == old.record.state
    anew = made(None, CLOSE, paths, tmp_path / "table", mode="overwrite", refit=True)
    assert anew.fingerprint != old.fingerprint
    assert {f.name for f in anew.fields if f.values_rule > 1} == NEW
    assert {*between(grown, anew).anew} >= {"part", "later", "age"}


ODD_NUMBERS = (
    -0.0,
    0.0,
    1.5,
    -2.25,
    -1e300,
    1e-300,
    float("nan"),
    float("inf"),
    float("-inf"),
    None,
)
