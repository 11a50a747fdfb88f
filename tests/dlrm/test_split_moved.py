"""A run does not go on where the rows that it trained on have become its test."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sluice import FeatureTable
from sluice.dlrm import evaluate, options, train
from sluice.dlrm.checkpoint.meta import read
from sluice.dlrm.follow.versions import seen_in
from sluice.dlrm.session.run import open_run
from tests.dlrm import clicks_table
from tests.dlrm.hostile_table import ended
from tests.product import (
    CheckpointDisk,
    CheckpointMeta,
    Config,
    SplitMoved,
    SplitRows,
    TrainingRun,
    mark_evaluated,
)
from tests.raises import raises

ROWS = 1500


def begun(run: Path, table: FeatureTable) -> Path:
    """A run that has finished and evaluated an epoch on this version, as far as its checkpoint says so."""
    folder = run / "checkpoints" / "step-000000005"
    folder.mkdir(parents=True)
    config = Config(data=table.uri, version=table.version, follow="epochs", epochs=2)
    meta = CheckpointMeta.of(table, config.to_dict())
    replace(meta, step=5, epoch=1, loader={"epoch": 1, "step": 0}).write(
        folder, {}, CheckpointDisk()
    )
    mark_evaluated(folder)
    return folder


@pytest.fixture
def table(tmp_path) -> FeatureTable:
    return clicks_table.write(tmp_path / "table", clicks_table.raw_rows(ROWS))


def again(tmp_path: Path, *, turned: bool) -> FeatureTable:
    """The same rows once more; turned around the first of train are the test."""
    raw = clicks_table.raw_rows(ROWS)
    return clicks_table.write(
        tmp_path / "table", raw.take(list(range(ROWS))[::-1]) if turned else raw, mode="overwrite"
    )


def plan(*words: object) -> TrainingRun:
    return open_run(options.parse([str(word) for word in words]))


def test_following_is_refused_with_the_share_or_accepted(table, tmp_path, capsys):
    folder = begun(tmp_path / "run", table)
    again(tmp_path, turned=False)
    assert plan("--run-dir", tmp_path / "run", "--resume").seen == ""
    again(tmp_path, turned=True)
    words = f"--run-dir {tmp_path}/run --resume --follow".split()
    assert ended(train.main, *words) == 2
    told = json.loads(capsys.readouterr().out)["error"]
    both = "100 % of the rows of split 'test' and 100 % of the rows of split 'validation'"
    for part in ("version 2 of", f"{both} were trained on", "accept it with --split-moved accept"):
        assert part in told
    going = plan(*words, "--split-moved", "accept")
    assert (going.config.version, going.options.split_moved) == (2, "accept")
    assert f"{both} were trained on" in going.seen
    # What it trains on from there on is known beside what it had trained on.
    before, now = read(folder).seen(), going.meta.seen()
    (both,) = now.sketches.values()
    assert (
        len(both["train"].hashes)
        == ROWS
        == len(next(iter(before.sketches.values()))["train"].hashes) + ROWS // 5
    )


def test_another_table_is_compared_too_and_so_is_one_that_is_evaluated(tmp_path):
    """Their ids are hashed, so that what the training rows hold does not give the tables other shapes."""
    features = clicks_table.FEATURES.replace(
        'op = "categorify", min_count = 2, oov = 4', 'op = "hash", size = 64'
    )
    raw, text = clicks_table.raw_rows(ROWS), clicks_table.spec_text(features=features)
    table = clicks_table.write(tmp_path / "table", raw, text=text)
    begun(tmp_path / "run", table)
    turned = raw.take([*range(ROWS // 2, ROWS), *range(ROWS // 2)])
    other = clicks_table.write(tmp_path / "other", turned, text=text)
    words = f"--run-dir {tmp_path}/run --data {other.uri}".split()
    with raises(SplitMoved, "100 %", "'test'"):
        evaluate.main([str(word) for word in words])
    meta = read(tmp_path / "run" / "checkpoints" / "step-000000005")
    assert seen_in(other, meta, "accept", split="test") != ""
    assert seen_in(table, meta, "refuse") == ""  # its own
    moved = clicks_table.write(
        tmp_path / "moved", raw, text=text
    )  # the same rows elsewhere, in the same splits
    assert seen_in(moved, meta, "refuse") == ""


def test_rows_that_are_identified_by_other_columns_are_refused(table, tmp_path):
    meta = CheckpointMeta.of(table, {})
    text = clicks_table.spec_text().replace("[table]", '[table]\nkey = ["number"]')
    keyed = clicks_table.write(tmp_path / "keyed", clicks_table.raw_rows(ROWS), text=text)
    with raises(SplitMoved, "first version's input columns", "the key number"):
        seen_in(keyed, meta, "refuse")
    assert SplitRows.of(keyed.records.values()).rule.text == "the key number"
