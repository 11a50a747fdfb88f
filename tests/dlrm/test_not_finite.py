"""Runs of the trainer on a table with one value that no float32 arithmetic survives."""

import re
from pathlib import Path

import pytest

from benchmarks.small_table import small_table
from sluice import FeatureTable
from tests.dlrm.forks import Forks
from tests.dlrm.rig import logged, run_words
from tests.dlrm.test_train import spoil
from tests.product import Checkpoint, complete_checkpoints, latest
from tests.raises import assert_names
from tests.run_program import last_json

pytestmark = pytest.mark.slow

ROWS, BATCH = 4800, 64
WORDS = f"--batch-size {BATCH} --save-every 3 --log-every 20 --seed 1"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One row of its training split has 3e38 in a column."""
    path = tmp_path_factory.mktemp("extreme") / "table"
    small_table(path, rows=ROWS, files=2, row_group_rows=512)
    make_extreme(path, 100)
    return path


def make_extreme(table: Path, row: int) -> str:
    """Puts 3e38 into this row of the second row group of the second file; returns the file."""
    file = FeatureTable.open(table).files_of("train")[1].path
    spoil(file, "I3", row=512 + row, value=3e38)
    return file


def finite(run: Path) -> list[int]:
    """The steps of a run's checkpoints, each of which is finite."""
    names = list(complete_checkpoints(run / "checkpoints"))
    for name in names:
        reader = Checkpoint(run / "checkpoints" / name)
        reader.tensors(reader.sizes)
    return [int(name.removeprefix("step-")) for name in names]


def test_a_value_that_ends_the_finite_numbers_is_named_and_costs_no_checkpoint(
    table, tmp_path, forks: Forks
):
    """The run ends at that step, can be resumed without the batch, and has then trained on all others."""
    run = tmp_path / "run"
    words = run_words(tmp_path, WORDS, "--model dcn", data=table)
    ended = forks.train(*words, tmp=tmp_path, code=2)
    text = last_json(ended)["error"]
    assert_names(
        text, "nan at step", "'I3' holds 3e+38", "part-00001.parquet", "row group 1", "row 100"
    )
    assert "Traceback" not in ended.stderr
    step = int(text.partition("at step ")[2].partition(".")[0])
    assert latest(run / "checkpoints")[1].step == finite(run)[-1] == (step - 1) // 3 * 3
    again = forks.train(*f"--run-dir {run} --resume --on-nonfinite skip".split(), tmp=tmp_path)
    result = last_json(again)
    steps = ROWS * 8 // 10 // BATCH
    assert (result["steps"], result["batches_skipped"], result["rows_trained"]) == (
        steps,
        1,
        (steps - 1) * BATCH,
    )
    assert 0.4 < result["auc"] < 1
    finite(run)
    skipped = [event for event in logged(run, "warning") if "is left out" in event["text"]]
    assert [(event["step"], "row group 1, row 100" in event["text"]) for event in skipped] == [
        (step, True)
    ]


def test_a_state_that_is_infinite_after_a_finite_loss_is_not_saved_and_explained(
    tmp_path, forks: Forks
):
    """DLRM multiplies the value less often: where it predicts the wrong label, the loss is large, and only the squares
    of gradients are infinite."""
    small_table(tmp_path / "table", rows=ROWS, files=2, row_group_rows=512)
    for row, label in ((100, 0), (101, 1)):
        spoil(make_extreme(tmp_path / "table", row), "label", row=512 + row, value=label)
    ended = forks.train(*run_words(tmp_path, WORDS), tmp=tmp_path, code=2)
    text = last_json(ended)["error"]
    assert_names(text, "not written", "'I3' holds 3e+38")
    assert re.search(r"part-00001.parquet, row group 1, row 10[01]\)", text)
    finite(tmp_path / "run")


def test_a_rate_that_ends_the_finite_numbers_is_named(tmp_path, forks: Forks):
    small_table(tmp_path / "table", rows=1200)
    words = run_words(tmp_path, WORDS, "--dense-lr", 1e30)
    ended = forks.train(*words, tmp=tmp_path, code=2)
    text = last_json(ended)["error"]
    assert "1e+06" in text
    assert "try a tenth of --lr 0.05 and --dense-lr" in text
    finite(tmp_path / "run")
