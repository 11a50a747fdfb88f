"""Transforms in training, evaluation and serving alike: found by a run that goes on, follows a table, or is served."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sluice.dlrm import evaluate, train
from sluice.dlrm.checkpoint.meta import latest
from sluice.dlrm.config import Config
from sluice.dlrm.follow.table_diff import between
from sluice.dlrm.follow.versions import start_on
from sluice.dlrm.serving.served_model import Servable
from sluice.dlrm.training import loaders
from sluice.etl.common.program import run as run_program
from sluice.etl.ops.base import OperatorError
from sluice.etl.spec.permission import Permission
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.table.table import FeatureTable
from tests.dlrm import clicks_table
from tests.dlrm.rig import last_json, launch

pytestmark = pytest.mark.slow

MODULE = "tests.ingest.transform_functions"
ROWS = 3000
TRANSFORMS = f"""
[[transform]]
name = "ratio"
function = "{MODULE}:ratio"
inputs = ["I1", "number", "C1", "C5"]
outputs = ["I1", {{name = "ratio", role = "dense"}}, {{name = "pair", role = "sparse", cardinality = 50}},
           {{name = "both", role = "id_list", cardinality = 7}}]
[[transform]]
name = "crossed"
op = "cross"
size = 300
inputs = ["C1", "pair"]
outputs = ["C1xpair"]
[[transform]]
name = "grams"
ops = [{{op = "ngram", size = 2}}, {{op = "hash", size = 40}}]
inputs = ["tags"]
outputs = ["grams"]
"""
SPEC = clicks_table.spec_text(features=clicks_table.FEATURES + TRANSFORMS)
DOUBLED = f"{MODULE}:doubled:I1>I1"
SMALL = ("--batch-size", 256, "--width", 8, "--dense-layers", 8, "--over-layers", 8, "--tuning", "fixed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose spec has transforms, and a run of one epoch over it."""
    path = tmp_path_factory.mktemp("transforms")
    clicks_table.write(path / "table", clicks_table.raw_rows(ROWS), text=SPEC)
    process = launch(0, "dlrm.train", "--run-dir", path / "run", "--data", path / "table", *SMALL, "--allow-code",
                     MODULE, "--transform", DOUBLED, tmp=path)
    assert process.returncode == 0, process.stderr[-3000:]
    (path / "trained.json").write_text(json.dumps(last_json(process)))
    return path


def ended(main, *words: object) -> int:
    with pytest.raises(SystemExit) as end:
        run_program(main, argv=[str(word) for word in words])
    return int(end.value.code or 0)


def test_the_model_has_what_transforms_add(folder):
    meta = latest(folder / "run" / "checkpoints")[1]
    assert meta.dense == ("number", "I1", "I2", "I5", "ratio")
    assert {name: meta.columns[name] for name in ("pair", "both", "C1xpair", "grams")} == {
        "pair": 50, "both": 7, "C1xpair": 302, "grams": 42}


def test_a_server_makes_of_raw_rows_what_the_loader_gave_the_trainer(folder):
    servable = Servable.load(folder / "run", "fp32", allow_code=(MODULE,))
    config = Config.from_dict(servable.meta.config)
    with loaders.evaluation(config, servable.table, "train", rank=0, local_ranks=1) as batches:
        batch = next(iter(batches))
    order = batch.dense[:, 0].argsort()[:200]  # each row has a number of its own
    numbers = torch.expm1(batch.dense[order, 0].double()).round().long().tolist()
    raw = clicks_table.raw_rows(ROWS).drop_columns("label").take(numbers)
    plain = FeatureTable.open(config.data, allow_code=(MODULE,))
    assert [one.name for one in servable.table.transforms] == [*(one.name for one in plain.transforms), "doubled"]
    made = servable.batch({name: raw[name].combine_chunks() for name in raw.column_names})
    torch.testing.assert_close(made.dense, batch.dense[order], rtol=0, atol=0)
    columns = [c.name for c in servable.layout.columns]

    def rows_of(one, rows: int) -> list[list[list[int]]]:
        lengths = one.lengths.view(len(columns), rows)
        ids = one.values.split(lengths.sum(1).tolist())
        return [[bag.tolist() for bag in part.split(counts)]
                for part, counts in zip(ids, lengths.tolist(), strict=True)]

    theirs = rows_of(batch, len(batch.label))
    assert rows_of(made, 200) == [[column[row] for row in order.tolist()] for column in theirs]
    assert {len(bag) for bag in theirs[columns.index("grams")]} >= {0, 1}


@pytest.mark.filterwarnings("ignore::FutureWarning",
                            "ignore::UserWarning")  # torch of torchrec, see sluice.dlrm.telemetry.silence_warnings
def test_evaluation_resume_and_server_find_them_and_ask_for_the_code_again(folder, capsys, monkeypatch):
    run, wanted = folder / "run", json.loads((folder / "trained.json").read_text())
    for main, words in ((train.main, ("--run-dir", run, "--resume", "--epochs", 2, "--check")),
                        (evaluate.main, ("--run-dir", run))):
        assert ended(main, *words) == 2
        assert f"transform 'ratio' names the function '{MODULE}:ratio', which must run here" in (
            capsys.readouterr().err)
        assert ended(main, *words, "--allow-code", MODULE) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["auc"] == pytest.approx(wanted["auc"], abs=1e-9)
    assert ended(train.main, "--run-dir", run, "--resume", "--transform", f"{MODULE}:doubled:I2>I2") == 2
    assert f"--resume: transforms was ('{DOUBLED}',) and cannot become" in capsys.readouterr().err
    with pytest.raises(OperatorError, match=rf"transform 'ratio' names the function .* --allow-code {MODULE}"):
        Servable.load(run, "fp32")
    monkeypatch.setitem(sys.modules, MODULE, None)  # it can no longer be imported
    gone = rf"transform 'ratio': function = '{MODULE}:ratio': cannot be imported .*PYTHONPATH"
    assert ended(train.main, "--run-dir", run, "--resume", "--epochs", 2, "--check", "--allow-code", MODULE) == 2
    assert re.search(gone, capsys.readouterr().err)
    with pytest.raises(OperatorError, match=gone):
        Servable.load(run, "fp32", allow_code=(MODULE,))


def test_a_run_goes_on_with_another_version_that_has_their_columns_and_names_those_it_lacks(folder, tmp_path):
    path = tmp_path / "table"
    first = clicks_table.write(path, clicks_table.raw_rows(ROWS), text=SPEC)
    more = SPEC.replace("cardinality = 50", "cardinality = 60")
    second = clicks_table.write(path, clicks_table.raw_rows(ROWS, first=ROWS), text=more, mode="overwrite")
    changes = between(first, second)
    assert changes.anew["pair"] == "its transforms make it in another way"
    assert changes.anew["C1xpair"] == "a transform makes it of 'pair', which has changed"
    assert not {"grams", "C1"} & changes.anew.keys()
    assert "its transforms make it in another way" in changes.dense_changed["ratio"]
    # What the run was asked for on top is applied to the new version, too, which may lack its columns.
    meta = latest(folder / "run" / "checkpoints")[1]
    meta = replace(meta, trained={}, config={**meta.config, "data": str(path), "transforms": [f"{MODULE}:f:C9>x"]})
    plan = start_on(tmp_path / "run", tmp_path, meta, 1, split_moved="accept", allow_code=Permission.of((MODULE,)))
    assert (plan.meta.columns["pair"], plan.meta.dense[-1], plan.changes.grown.get("x")) == (60, "x", None)
    assert plan.table.permission.modules == {MODULE}
    without = more.replace('match = "C*"', 'match = "C[15]*"')
    third = clicks_table.write(path, clicks_table.raw_rows(ROWS), text=without, mode="overwrite")
    with pytest.raises(SpecError, match=rf"{path}, version {third.version}: transform 'f': it needs a column 'C9'"):
        start_on(tmp_path / "run", tmp_path, meta, third.version)


def test_use_counted_by_the_etl_is_not_taken_for_that_of_ids_that_a_transform_gives(folder):
    from sluice.dlrm.config import ModelConfig, profile_of, tables_of

    table = FeatureTable.open(folder / "table", transforms=("mine:f:C1>C1",))
    found = {t.name: t for t in tables_of(table.fields, ModelConfig(), profile_of(table))}
    assert found["C5"].use
    assert not found["C1"].use
    assert found["C1"].rows == next(f.cardinality for f in table.stored if f.name == "C1")
    assert np.isfinite(found["pair"].lookups)
