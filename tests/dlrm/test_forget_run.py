"""`sluice forget --run`: the row of a key is 0 in every checkpoint, with its optimiser's state, and no other row
changes."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice import FeatureTable
from sluice.dlrm.checkpoint.meta import check, read
from tests.dlrm.rig import written
from tests.etl.forgotten import files_with
from tests.etl.test_forget import GONE, Killed, forget, small
from tests.product import (
    Checkpoint,
    CheckpointDisk,
    CheckpointMeta,
    Config,
    ModelConfig,
    UsageError,
    best,
    complete_checkpoints,
    latest,
    mark_best,
    spread_rows,
)
from tests.raises import raises

KEY = "model.tables.embedding_bags.{}.weight"
STATE = "tables.state.tables.embedding_bags.{0}.weight.{0}.momentum1"


def tensors_of(table: FeatureTable, draw: random.Random) -> dict[str, torch.Tensor]:
    """Weights and states as a run may have them: a state with a number for each row, or for each row in each of several
    parts of the columns, or as large as the weights."""
    tensors = {"model.tower.over.0.weight": torch.rand(3, 4), "dense.step": torch.tensor(5.0)}
    for field in table.fields:
        if field.role == "sparse":
            rows, names = field.cardinality, [field.name, f"{field.name}@wide"]
            for name in names[: draw.randint(1, 2)]:
                shape = draw.choice([(rows,), (3 * rows,), (rows, 4)])
                tensors[KEY.format(name)] = 1 + torch.rand(rows, 4)
                tensors[STATE.format(name)] = 1 + torch.rand(*shape)
    return tensors


def make_run(folder: Path, draw: random.Random) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """Makes a table, and a run with three checkpoints of which the first is the best."""
    small(folder, "categorify", "hash", "key")
    table = FeatureTable.open(folder / "table")
    spread = ("of_categorify",) if draw.random() < 0.5 else ()
    config = replace(
        Config(data=table.uri, version=1, ranks=1), model=ModelConfig(spread=spread)
    ).to_dict()
    meta, run = CheckpointMeta.of(table, config), folder / "run"
    made = [tensors_of(table, draw) for _ in range(3)]
    for number, tensors in enumerate(made):
        path = run / "checkpoints" / f"step-{number:09d}"
        written(tensors, path, replace(meta, step=number, epoch=1, loader={"step": 3}))
    mark_best(run / "checkpoints" / "step-000000000", 0.75)
    (run / "predictions.parquet").touch()
    return run, made


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    check(path)
    return Checkpoint(path).tensors(Checkpoint(path).sizes)


def assert_cleared(run: Path, made: list[dict[str, torch.Tensor]], ids: dict[str, int]) -> None:
    """Only the key's rows are 0, and the run continues at the start of the epoch of the table's newest version."""
    folder = run / "checkpoints"
    names = list(complete_checkpoints(folder))
    version = FeatureTable.open(run.parent / "table").version
    metas = [read(folder / name) for name in names]
    assert latest(folder)[0].name == names[-1]
    assert (best(folder)[0].name, best(folder)[1]) == (names[0], 0.75)
    assert {(meta.version, meta.epoch, str(meta.loader)) for meta in metas} == {(version, 1, "{}")}
    assert {meta.config["version"] for meta in metas} == {version}
    spread = Config.from_dict(metas[0].config).model.spread
    for name, before in zip(names, made, strict=True):
        now = tensors_in(folder / name)
        assert now.keys() == before.keys()
        for key, value in before.items():
            column = key.partition(".embedding_bags.")[2].partition(".")[0].partition("@")[0]
            want = value.clone()
            if column in ids:
                rows = len(before[KEY.format(column)])
                row = (
                    int(spread_rows(torch.tensor(ids[column]), rows))
                    if column in spread
                    else ids[column]
                )
                for part in range(row, len(want), rows):
                    want[part] = 0
                assert not torch.equal(want, value)
            assert torch.equal(now[key], want), key
    assert files_with(run, GONE) == []


@pytest.mark.parametrize("seed", range(6))
def test_of_drawn_checkpoints_only_the_rows_of_the_key_become_zero(tmp_path, seed):
    run, made = make_run(tmp_path, random.Random(seed))
    (run / "events.jsonl").write_text(f'{{"reason": "{GONE}0 has no price"}}')
    told = forget(tmp_path / "table", "--run", str(run))
    assert told["ids"].keys() == {"of_categorify", "of_hash"}
    assert_cleared(run, made, told["ids"])
    assert told["runs"][str(run)]["predictions"] == ["predictions.parquet"]
    assert not (run / "predictions.parquet").exists()
    assert told["runs"][str(run)]["named_in"] == []
    again = sorted((run / "checkpoints").iterdir())
    (run / "events.jsonl").write_text(f'{{"reason": "{GONE} has no price"}}')
    told = forget(tmp_path / "table", "--run", str(run), "--shared")
    assert told["runs"][str(run)]["named_in"] == ["events.jsonl"]
    assert sorted((run / "checkpoints").iterdir()) == again


def test_a_kill_at_any_moment_leaves_a_run_that_a_second_call_finishes(tmp_path, monkeypatch):
    _, made = make_run(tmp_path, random.Random(1))
    left = 10**9

    def counted(function):
        def call(*args, **more):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*args, **more)

        return call

    for name in ("make", "write", "replace", "remove", "sync_folder"):
        monkeypatch.setattr(CheckpointDisk, name, counted(getattr(CheckpointDisk, name)))
    for moment in range(0, 400, 5):
        folder = tmp_path / "again"
        for part in ("table", "run"):
            shutil.copytree(tmp_path / part, folder / part)
        left = moment
        try:
            told = forget(folder / "table", "--run", str(folder / "run"))
        except Killed:
            left = 10**9
            check(latest(folder / "run" / "checkpoints")[0])
            check(best(folder / "run" / "checkpoints")[0])
            told = forget(folder / "table", "--run", str(folder / "run"))
            names = complete_checkpoints(folder / "run" / "checkpoints")
            for name in names:
                now = tensors_in(folder / "run" / "checkpoints" / name)
                assert not any(
                    now[KEY.format(column)][row].any()
                    for column, row in told["ids"].items()
                    if not spread_of(folder)
                )
        else:
            assert_cleared(folder / "run", made, told["ids"])
            assert moment > 40
            return
        shutil.rmtree(folder)
    pytest.fail("it never ended")


def spread_of(folder: Path) -> tuple[str, ...]:
    return Config.from_dict(latest(folder / "run" / "checkpoints")[1].config).model.spread


def test_a_run_of_another_version_is_refused_by_name_and_an_old_checkpoint_is_removed(tmp_path):
    run, _ = make_run(tmp_path, random.Random(2))
    folder = run / "checkpoints"
    path, meta = latest(folder)
    replace(meta, version=0).put(path, CheckpointDisk())
    with raises(UsageError, path, "version 0", "--follow"):
        forget(tmp_path / "table", "--run", str(run))
    meta.put(path, CheckpointDisk())
    old = folder / "step-000000001-2"
    replace(read(old), version=0).put(old, CheckpointDisk())
    told = forget(tmp_path / "table", "--run", str(run))
    assert old.name in told["runs"][str(run)]["checkpoints"]
    assert len(complete_checkpoints(folder)) == 2
