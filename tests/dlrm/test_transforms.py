"""Transforms in training, evaluation and serving alike: found by a run that goes on, follows a table, or is served."""

import json
import re
import sys

import numpy as np
import pytest

from sluice import FeatureTable
from sluice.dlrm import evaluate, train
from sluice.dlrm.options import StartOptions
from tests.dlrm import clicks_table
from tests.dlrm.hostile_table import ended
from tests.dlrm.rig import torchrec_warns
from tests.dlrm.transformed_table import DOUBLED, MODULE, ROWS, SPEC
from tests.product import Config, Run, SpecError, Story, TrainingRun, between, latest
from tests.raises import assert_names, raises
from tests.run_program import last_json

pytestmark = pytest.mark.slow


@torchrec_warns
def test_evaluation_and_resume_find_them_and_ask_for_the_code_again(
    transformed, capsys, monkeypatch
):
    run, wanted = transformed / "run", json.loads((transformed / "trained.json").read_text())
    for main, words in (
        (train.main, f"--run-dir {run} --resume --epochs 2 --check".split()),
        (evaluate.main, ("--run-dir", run)),
    ):
        assert ended(main, *words) == 2
        assert_names(capsys.readouterr().err, "transform 'ratio'", f"'{MODULE}:ratio'")
        assert ended(main, *words, "--allow-code", MODULE) == 0
        evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert evaluated["auc"] == pytest.approx(wanted["auc"], abs=1e-9)
    assert (
        ended(
            train.main, *f"--run-dir {run} --resume --transform".split(), f"{MODULE}:doubled:I2>I2"
        )
        == 2
    )
    assert f"--resume: transforms was ('{DOUBLED}',) and cannot become" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, MODULE, None)  # it can no longer be imported
    gone = rf"transform 'ratio': function = '{MODULE}:ratio': cannot be imported .*PYTHONPATH"
    assert (
        ended(
            train.main,
            *f"--run-dir {run} --resume --epochs 2 --check --allow-code {MODULE}".split(),
        )
        == 2
    )
    assert re.search(gone, capsys.readouterr().err)


def test_a_training_keeps_what_a_pure_transform_makes_and_trains_the_same(tmp_path, forks):
    module, table = "tests.ingest.cached_functions", tmp_path / "table"
    clicks_table.write(table, clicks_table.raw_rows(ROWS))
    runs = {}
    for name, mark, cache in (("plain", "", ""), ("cached", "@pure", f"--cache {tmp_path}/made")):
        more = f"{cache} --epochs 2 --batch-size 256 --width 8 --tuning fixed"
        process = forks.train(
            *f"--run-dir {tmp_path}/{name} --data {table} {more}".split(),
            *f"--allow-code {module} --transform".split(),
            f"{module}:mixed:I1,number,C1>I1,sum,pair=50{mark}",
            tmp=tmp_path,
        )
        last = last_json(process)
        run = Run.read(tmp_path / name)
        runs[name] = [line["loss"] for line in run.of("train")], last["auc"], last["logloss"]
    assert runs["cached"] == runs["plain"]
    assert last["input"]["cache"]["rows_read"] > 0
    assert_names(Story.of(run).explanation, "Cache", "'mixed'", "rows came from the cache")


def test_a_run_goes_on_with_another_version_that_has_their_columns_and_names_those_it_lacks(
    transformed, tmp_path
):
    path = tmp_path / "table"
    first = clicks_table.write(path, clicks_table.raw_rows(ROWS), text=SPEC)
    more = SPEC.replace("cardinality = 50", "cardinality = 60")
    second = clicks_table.write(
        path, clicks_table.raw_rows(ROWS, first=ROWS), text=more, mode="overwrite"
    )
    changes = between(first, second)
    assert "transforms" in changes.anew["pair"]
    assert "'pair'" in changes.anew["C1xpair"]
    assert not {"grams", "C1"} & changes.anew.keys()
    assert "transforms" in changes.dense_changed["ratio"]
    # What the run was asked for on top is applied to the new version, too, which may lack its columns.
    meta = latest(transformed / "run" / "checkpoints")[1]
    given = {"data": str(path), "transforms": [f"{MODULE}:f:C9>x"]}
    config = Config.from_dict({**meta.config, **given})
    before = FeatureTable.open(path, 0, allow_code=(MODULE,), transforms=config.transforms)
    run = TrainingRun(
        options=StartOptions(run=transformed / "run", split_moved="accept"),
        config=config,
        table=config.changed_table(before),
        meta=meta,
    )
    plan = run.on_version(1)
    assert (plan.meta.columns["pair"], plan.meta.dense[-1], plan.changes.grown.get("x")) == (
        60,
        "x",
        None,
    )
    assert plan.table.permission.modules == {MODULE}
    without = more.replace('match = "C*"', 'match = "C[15]*"')
    third = clicks_table.write(path, clicks_table.raw_rows(ROWS), text=without, mode="overwrite")
    with raises(SpecError, f"{path}, version {third.version}", "transform 'f'", "'C9'"):
        run.on_version(third.version)


def test_use_counted_by_the_etl_is_not_taken_for_that_of_ids_that_a_transform_gives(transformed):
    from sluice.dlrm.options import ModelConfig, profile_of, tables_of

    table = FeatureTable.open(transformed / "table", transforms=("mine:f:C1>C1",))
    tables = {t.name: t for t in tables_of(table.fields, ModelConfig(), profile_of(table))}
    assert tables["C5"].use
    assert not tables["C1"].use
    assert tables["C1"].rows == next(f.cardinality for f in table.stored if f.name == "C1")
    assert np.isfinite(tables["pair"].lookups)
