"""An unedited guess of each stand-in trains about as well as a logistic regression on the same rows."""

from pathlib import Path

import pytest
import torch

from sluice import FeatureTable
from tests.dlrm.forks import Forks
from tests.dlrm.stand_ins import STAND_INS, logistic_auc
from tests.etl.jobs import run
from tests.product import Spec, guessed_spec
from tests.raises import assert_names
from tests.run_program import last_json

pytestmark = pytest.mark.slow
ROWS = 16_000
NEAR = 0.02


def trained(forks: Forks, table: Path, folder: Path, *words: str) -> tuple[dict, str]:
    process = forks.train(*f"--run-dir {folder}/run --data {table}".split(), *words, tmp=folder)
    return last_json(process), process.stderr


@pytest.fixture
def one_thread():
    """Threads of torch that wait for a core of a busy machine take most of a small model's time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", STAND_INS)
def test_an_unedited_guess_comes_near_a_logistic_regression(tmp_path, forks, name):
    write, ending = STAND_INS[name]
    write(tmp_path / f"log.{ending}", ROWS, 0)
    text = guessed_spec(str(tmp_path / f"log.{ending}"))
    result = run(None, tmp_path / "table", tmp_path / f"log.{ending}", text=text)
    assert result.rejected == {}
    last, said = trained(forks, tmp_path / "table", tmp_path)
    expected = logistic_auc(FeatureTable.open(tmp_path / "table"))
    assert 0.6 < expected < 0.95
    assert last["auc"] > expected - NEAR
    assert "alone predicts" not in said
    spec = Spec.own(text)
    roles = {column.name: column.role for column in spec.columns}
    if name == "criteo":
        assert sorted(roles.values()) == ["dense"] * 6 + ["label"] + ["sparse"] * 8
    else:
        assert "dense" not in roles.values()
        assert spec.table.split_time == "click_time"
        assert not any("attributed_time" in column for column in roles)


def test_who_adds_the_column_that_tells_the_label_is_warned_by_name(tmp_path, forks):
    """The run goes on, and no column is dropped."""
    STAND_INS["talking_data"][0](tmp_path / "log.csv", ROWS, 1)
    text = guessed_spec(str(tmp_path / "log.csv")) + (
        '[[column]]\nname = "later"\nfrom = "attributed_time"\nrole = "sparse"\nops = [{op = "parse_time"}, '
        '{op = "hour"}, {op = "modulus", size = 24}]\n'
    )
    run(None, tmp_path / "table", tmp_path / "log.csv", text=text)
    last, said = trained(forks, tmp_path / "table", tmp_path)
    assert last["auc"] > 0.999
    assert_names(said, "column 'later' alone predicts", "AUC 1.0000", "column 'later' alone has")
