"""Training on tables and files of other programs, by a spec: the version is part of the run, and a resume keeps it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from benchmarks.small_table import small_table
from sluice.dlrm.foreign_table import open_table
from tests.dlrm.rig import logged, run_words
from tests.product import Config, ConfigError, ModelConfig, guessed_spec, latest
from tests.raises import assert_names, raises
from tests.run_program import last_json

ROWS = 2400


def clicks(seed: int, rows: int = ROWS) -> pa.Table:
    """Clicks with raw ids. Prices and ads decide the label."""
    chance = np.random.default_rng(seed)
    ads, prices = chance.integers(0, 40, rows), chance.lognormal(1, 1, rows)
    chances = 1 / (1 + np.exp(3 - ads % 7 + (np.log(prices) - 1)))
    seconds = np.sort(chance.integers(0, 30 * 86_400, rows)) + 1_700_000_000
    return pa.table(
        {
            "clicked": (chance.random(rows) < chances).astype("int8"),
            "ad_id": ads * 31 + 5,
            "country": np.array(["de", "fr", "it"])[chance.integers(0, 3, rows)],
            "price": prices,
            "ts": pa.array(seconds * 1_000_000, pa.timestamp("us")),
        }
    )


def as_delta(folder: Path, *parts: pa.Table) -> str:
    for part in parts:
        write_deltalake(folder, part, mode="append")
    return str(folder)


def as_files(folder: Path, *parts: pa.Table) -> str:
    folder.mkdir(exist_ok=True)
    for part in parts:
        number = len([*folder.glob("*.parquet")])
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=500)
    return str(folder)


def spec_of(source: str, folder: Path) -> Path:
    (folder / "spec.toml").write_text(guessed_spec(source))
    return folder / "spec.toml"


def words(folder: Path, run: str, *more: object) -> list[object]:
    return run_words(folder, "--batch-size 96", *more, run=run)


def hashes(run: Path) -> list[str]:
    return [line["order_hash"] for line in logged(run, "epoch")]


def test_a_feature_table_keeps_its_own_spec(tmp_path):
    """For such a table, `--spec` only permits functions."""
    table = small_table(tmp_path / "t", rows=100)
    assert open_table(table.uri, spec="[input]") == table


def check_predictions(file: Path, found: dict) -> pa.Table:
    """Checks a file of predictions against the last line, and returns it."""
    rows = pq.read_table(file)
    assert rows.num_rows == found["rows"]
    assert rows["label"].to_pylist() == rows["clicked"].to_pylist(), "rows keep their columns"
    labels, chances = (rows[name].to_numpy() for name in ("label", "prediction"))
    losses = -np.log(np.where(labels == 1, chances, 1 - chances))
    assert losses.mean() == pytest.approx(found["logloss"])
    for name, values in found["by"].items():
        column = rows[name].to_pylist()
        for value, figures in values.items():
            among = np.array([str(one) == value for one in column])
            assert figures["rows"] == among.sum()
            assert figures["logloss"] == pytest.approx(losses[among].mean())
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "files"])
def test_a_run_resumes_exactly_while_its_table_changes(tmp_path, forks, kind):
    """It pauses within its first epoch, and goes on to the same weights as one that does not pause. On files it has
    two ranks."""
    ranks = 2 if kind == "files" else 0
    source = (as_delta if kind == "delta" else as_files)(tmp_path / "table", clicks(0), clicks(1))
    spec = spec_of(source, tmp_path)
    given = f"--spec {spec} --epochs 2 --evals 2"
    whole = forks.train(*words(tmp_path, "whole", given), tmp=tmp_path, ranks=ranks)
    last = last_json(whole)
    assert last["auc"] > 0.6
    rest = words(tmp_path, "run", given, "--pause-after 1")
    paused = forks.train(*rest, tmp=tmp_path, ranks=ranks)
    assert last_json(paused)["stopped"]
    meta = latest(tmp_path / "run" / "checkpoints")[1]
    assert meta.loader["step"] > 0
    version = open_table(source, spec=spec.read_text()).version
    assert meta.version == meta.config["version"] == last["version"] == version
    spec.unlink()  # the run has its text
    resume = ("--run-dir", tmp_path / "run", "--resume")
    if kind == "delta":
        as_delta(tmp_path / "table", clicks(2))
    else:
        as_files(tmp_path / "table", clicks(2))
        refused = forks.train(*resume, tmp=tmp_path, ranks=ranks, code=None)
        assert_names(last_json(refused)["error"], source, version)
        (tmp_path / "table" / "2.parquet").unlink()
    resumed = forks.train(*resume, tmp=tmp_path, ranks=ranks)
    again = last_json(resumed)
    for figure in ("auc", "logloss", "rows", "steps", "version", "rows_trained"):
        assert again[figure] == last[figure], figure
    assert hashes(tmp_path / "run") == hashes(tmp_path / "whole")
    if kind != "files":
        return
    evaluated = ("dlrm.evaluate", *f"--run-dir {tmp_path}/run --split test".split())
    files = []
    for number in (0, 2):
        file = tmp_path / f"{number}.parquet"
        more = ("--predictions", file, "--by", "country", "--by", "ad_id", "--by", "clicked")
        evaluation = forks.run(*evaluated, *more, tmp=tmp_path, ranks=number)
        found = last_json(evaluation)
        assert found["rows"] == last["rows"], evaluation.stderr[-3000:]
        assert list(found["by"]["country"]) == ["de", "fr", "it"]
        assert len(found["by"]["ad_id"]) == 40
        assert_names(evaluation.stderr, "country de: auc")
        assert "ad_id 5: " not in evaluation.stderr
        files.append(check_predictions(file, found))
    alone, shared = files
    assert alone.drop_columns("prediction") == shared.drop_columns("prediction")
    assert alone["prediction"].to_pylist() == pytest.approx(shared["prediction"].to_pylist())
    refused = forks.run(*evaluated, "--by", "county", tmp=tmp_path, code=2)
    assert_names(refused.stderr, "'county'", "'country'")
    served = forks.run("dlrm.serve", tmp_path / "run", "--port", 0, tmp=tmp_path, code=2)
    assert_names(served.stderr, "--spec", "sluice etl --spec")


@pytest.mark.slow
def test_a_run_with_another_spec_or_without_one_is_refused(tmp_path, forks):
    source = as_delta(tmp_path / "table", clicks(0))
    spec = spec_of(source, tmp_path)
    rest = words(tmp_path, "run")
    assert_names(last_json(forks.train(*rest, tmp=tmp_path, code=2))["error"], source, "--spec")
    forks.train(*rest, *f"--spec {spec} --epochs 2 --pause-after 1".split(), tmp=tmp_path)
    spec.write_text(spec.read_text().replace("ts_hour", "hour"))
    again = forks.train(
        *f"--run-dir {tmp_path}/run --resume --spec {spec}".split(), tmp=tmp_path, code=2
    )
    assert_names(last_json(again)["error"], spec, "--spec")


def test_what_needs_a_feature_table_is_refused():
    for more in (
        {"follow": "epochs"},
        {"model": ModelConfig(kind="dien", history="past", target="item")},
    ):
        with raises(ConfigError, "--spec", "sluice etl --spec"):
            Config(data="t", version=0, spec="[input]", **more)
