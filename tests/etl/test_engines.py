"""Both engines make the same table of the same input: rows, files, order, states, records, schema and rejects."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from sluice.etl.jobs.job_run import Job
from sluice.etl.local.input import only_spark
from sluice.etl.spec.spec import Spec
from sluice.etl.synth.other_shapes import synthesize_shape
from sluice.etl.synth.raw_logs import synthesize
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable
from tests.etl.jobs import on

# pyspark 4.1 leaves the sockets through which it collects to the garbage collector.
pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]

FEATURES = Path(__file__).resolve().parents[2] / "features"
SPECS = sorted(path.stem for path in FEATURES.glob("*.toml") if only_spark(Spec.read(path)) is None)
OTHERWISE = {"job", "at", "files", "engine"}
"""What of a record says who wrote it, when and where."""


def test_all_shipped_specs_but_the_relational_one_are_compared():
    assert SPECS == ["avazu", "criteo", "criteo_kaggle", "criteo_terabyte", "wide"]


def raw_of(name: str, folder: Path, seed: int) -> Path:
    path = folder / f"{name}-{seed}"
    if name in ("avazu", "wide"):
        synthesize_shape(name, path, rows=100 if name == "wide" else 1000, seed=seed)
        return path
    synthesize(path, rows=1000, seed=seed)
    lines = path.read_text().splitlines()
    if name == "criteo_terabyte":
        lines = [f"{number % 24 + (number % 2) / 2}\t{line}" for number, line in enumerate(lines)]
    lines[7] = "no click at all"
    lines[70] += "\t"
    lines[71] = lines[71].replace("\t", "\t\t", 1)
    path.write_bytes("\n".join(lines).encode() + b"\n1\t\xff\n")
    return path


def made(spark, text: str, inputs: list[Path], output: Path, **options: object) -> FeatureTable:
    job = Job(spec=Spec.own(text), inputs=tuple(map(str, inputs)), store=TableStore(output), max_rejects=0.1,
              split_moved="accept", **options)
    on(spark, job)
    return FeatureTable.open(output)


def bits(table: pa.Table) -> list[object]:
    """The columns so that NaN equals itself, and -0.0 does not equal 0.0."""
    return [column.combine_chunks().to_numpy(zero_copy_only=False).view(f"i{column.type.bit_width // 8}").tolist()
            if pa.types.is_floating(column.type) else column.to_pylist() for column in table.columns]


def rejects(table: FeatureTable) -> list[dict]:
    folder = Path(table.uri) / "_sluice" / "rejects" / table.record.job
    found = [json.loads(line) for path in folder.glob("*.json") for line in path.read_text().splitlines()]
    return sorted(found, key=lambda row: (row["file"], row.get("line", 0), row["raw"]))


def alike(one: FeatureTable, other: FeatureTable) -> None:
    assert one.fingerprint == other.fingerprint
    records = [{key: value for key, value in table.record.to_json().items() if key not in OTHERWISE}
               for table in (one, other)]
    assert records[0] == records[1]
    assert DeltaTable(one.uri).schema().to_json() == DeltaTable(other.uri).schema().to_json()
    assert [(f.split, f.rows, f.row_group_rows) for f in one.files] == \
        [(f.split, f.rows, f.row_group_rows) for f in other.files]
    for mine, theirs in zip(one.files, other.files, strict=True):
        tables = [pq.read_table(f.path, partitioning=None) for f in (mine, theirs)]
        assert tables[0].schema.names == tables[1].schema.names
        assert bits(tables[0]) == bits(tables[1])
    assert rejects(one) == rejects(other)
    assert other.check() == []


@pytest.mark.parametrize("name", SPECS)
def test_every_mode_makes_the_same_table(spark, tmp_path, name):
    text = (FEATURES / f"{name}.toml").read_text()
    first, second = (raw_of(name, tmp_path, seed) for seed in (1, 2))
    steps = [("create", [first], {}), ("append", [second], {}), ("overwrite", [second], {"refit": True}),
             ("overwrite", [first, second], {"update_state": True})]
    for mode, inputs, options in steps:
        both = [made(engine, text, inputs, tmp_path / where, mode=mode, **options)
                for engine, where in ((spark, "spark"), (None, "local"))]
        alike(*both)
    assert both[0].version == 3
    assert [table.record.engine for table in both] == ["spark", "local"]
