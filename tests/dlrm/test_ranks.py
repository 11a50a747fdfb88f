"""The sharded model on one and two ranks against a plain twin; checkpoints; evaluation. One run each for all tests."""

from __future__ import annotations

import pytest

from tests.dlrm.rig import last_json, launch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """What every rank count found. One rank also goes on from the checkpoint of two."""
    folder = tmp_path_factory.mktemp("ranks")
    results = {}
    for ranks in (2, 1):
        process = launch(ranks if ranks > 1 else 0, "tests.dlrm.ranks", folder, tmp=folder)
        assert process.returncode == 0, process.stderr[-3000:]
        assert "FutureWarning" not in process.stderr, process.stderr
        results[ranks] = last_json(process)
    return results


def test_row_wise_and_table_wise_are_in_one_run(found):
    assert set(found[2]["kinds"].values()) == {"row", "table"}
    assert found[2]["kinds"]["big"] == "row"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["auto", "row", "column"])
def test_training_equals_the_unsharded_twin(found, ranks, how):
    assert found[ranks][f"losses_{how}"] < 1e-5
    assert found[ranks][f"weights_{how}"] < 1e-5


@pytest.mark.parametrize("how", ["auto", "row", "column"])
def test_first_weights_do_not_depend_on_ranks_or_sharding(found, how):
    assert found[1]["first"] == found[2]["first"]
    assert found[1][f"first_{how}"] == found[2][f"first_{how}"] == 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("optimiser", ["adagrad", "adam"])
def test_a_resumed_run_has_the_same_losses_and_weights_to_the_last_digit(found, ranks, optimiser):
    result = found[ranks][f"resume_{optimiser}"]
    assert result["stopped"]
    assert result["at"] == {"epoch": 0, "step": 4}
    assert result["broken"] == result["straight"][:4]
    assert result["rest"] == result["straight"][4:]
    assert found[ranks][f"equal_{optimiser}"]


def test_one_rank_goes_on_from_a_checkpoint_of_two_under_another_sharding(found):
    assert found[1]["other"] == pytest.approx(found[2]["resume_adagrad"]["straight"][4:], abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_covers_all_ranks_rows(found, ranks):
    assert found[ranks]["quality"]["rows"] == 3 * 64
    assert found[ranks]["quality"]["logloss"] == pytest.approx(found[ranks]["loss"], abs=1e-6)
    assert found[ranks]["quality"]["auc"] == pytest.approx(found[3 - ranks]["quality"]["auc"], abs=1e-4)
