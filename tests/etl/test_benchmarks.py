"""What the ETL's benchmarks compare is the same work, and what they reckon is right."""

from __future__ import annotations

import pytest

from benchmarks.codecs import decoded, files_of, formats, written
from benchmarks.etl import beside, on_a_line
from benchmarks.etl_arms import ARMS, content
from benchmarks.etl_peers import alike
from benchmarks.etl_turns import KINDS, ROOT, asked_of, turns
from benchmarks.results import Results, table
from sluice.common.errors import UsageError
from sluice.etl.synth.raw_logs import synthesize
from tests.etl.jobs import run
from tests.raises import raises

ROWS = 3000
pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    synthesize(folder / f"rows-{ROWS}.tsv", rows=ROWS, seed=1)
    return folder


def test_pandas_and_the_loop_make_the_same_features_as_the_job(spark, work):
    found, raw = {}, work / f"rows-{ROWS}.tsv"
    for name in ("pandas", "python"):
        out = work / name
        out.mkdir()
        assert ARMS[name](raw, out) == ROWS
        found[name] = {"content": content(out), "scaled": 1}
    text, split = (
        (ROOT / "features/criteo.toml").read_text(),
        "split = {train = 0.8, validation = 0.1, test = 0.1}",
    )
    assert (
        split in text
    )  # the others learn from all rows, as the job does of a table that is all training
    run(spark, work / "table", raw, text=text.replace(split, "split = {train = 1.0}"))
    found["job"] = {"content": content(work / "table/data"), "scaled": 1}
    assert found["job"]["content"]["rows"] == ROWS
    alike(found)
    found["job"]["content"]["ids"] += 1
    with raises(RuntimeError, "features"):
        alike(found)


def test_all_kinds_of_turns_run_and_unknown_ones_are_named(spark, work):
    done = turns(spark, work, asked_of([f"{kind}:{ROWS}" for kind in KINDS]))
    assert [turn["kind"] for turn in done] == list(KINDS)
    assert all(turn["peak_mib"]["jvm"] > 0 for turn in done)
    with raises(UsageError, "'jobs:10'", "'job'"):
        asked_of(["jobs:10"])


def test_a_format_is_written_as_asked_and_read_back_by_the_loader(spark, work):
    form = next(f for f in formats("criteo") if f.codec == "zstd" and f.group_rows == 16_384)
    folder, seconds = written(spark, work, form, ROWS)
    spark.catalog.clearCache()
    assert seconds > 0
    assert sum(f.rows for f in files_of(folder)) == ROWS
    assert decoded(folder, 0.01, (1,)) > 0


def test_a_measurement_is_made_once_and_kept(tmp_path):
    asked = {"figure": "x", "rows": 3}
    assert Results(tmp_path / "r").once(asked, lambda: {"s": 1.5}) == {"s": 1.5}
    assert Results(tmp_path / "r").once(dict(reversed(asked.items())), lambda: 1 / 0) == {"s": 1.5}
    assert table([{"a": 1234, "b": 0.123456}, {"a": True, "c": "x"}]) == (
        "| a | b | c |\n| --- | --- | --- |\n| 1,234 | 0.123 |  |\n| yes |  | x |"
    )


def test_lines_and_ratios():
    far = on_a_line([(1_000_000, 10.0), (2_000_000, 23.0), (8_000_000, 80.0)])
    assert [round(point["off the line"], 3) for point in far] == [0, 0.15, 0]
    stages = {"fitting": 1.0, "writing": 1.0}
    pair = [
        {"kind": "rewrite", "seconds": 2.0, "cpu_s": 3.0},
        {"kind": "job", "seconds": 5.0, "cpu_s": 6.0, "stages_cpu_s": stages},
    ]
    assert beside(100, pair)["job / rewrite"] == 2.5
    assert beside(100, pair)["lowest"] == 50
