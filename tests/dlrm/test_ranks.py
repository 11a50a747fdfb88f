"""The sharded model on one, two and four ranks against a plain twin; checkpoints; evaluation. One run each."""

import pytest

from tests.dlrm.rig import KINDS, kinds
from tests.raises import assert_names
from tests.run_program import last_json

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# `deepfm` and `dien` with Adam, schedules and clipping, the first with spread tables; then tables of 16 bits; then a
# copy of each table on each rank, trained by element-wise Adagrad.
RUNS = ["adagrad", "deepfm", "dien", "fp16", "bf16", "copies"]
ON_RANKS = [(ranks, how) for ranks in (1, 2, 4) for how in kinds(ranks)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, forks) -> dict[int, dict]:
    """What every rank count found. One rank also goes on from the checkpoint of two."""
    folder = tmp_path_factory.mktemp("ranks")
    process = forks.run("tests.dlrm.ranks", folder, tmp=folder)
    assert "FutureWarning" not in process.stderr, process.stderr
    return {int(ranks): result for ranks, result in last_json(process).items()}


@pytest.fixture(params=[1, 2])
def ranks(request) -> int:
    return request.param


def test_row_wise_and_table_wise_are_in_one_run(outcomes):
    assert set(outcomes[2]["auto"]["kinds"].values()) == {"row", "table"}
    assert outcomes[2]["auto"]["kinds"]["big"] == "row"
    assert set(outcomes[4]["column"]["kinds"].values()) == {"column"}
    assert (
        set(outcomes[2]["data"]["kinds"].values())
        == set(outcomes[4]["data"]["kinds"].values())
        == {"data"}
    )


@pytest.mark.parametrize(("ranks", "how"), ON_RANKS)
def test_training_equals_the_unsharded_twin(outcomes, ranks, how):
    assert outcomes[ranks][how]["losses"] < 1e-5
    assert outcomes[ranks][how]["weights"] < 1e-5


@pytest.mark.parametrize("ranks", [2, 4])
def test_embeddings_sent_in_half_precision_change_a_loss_a_little(outcomes, ranks):
    assert 0 < outcomes[ranks]["half"] < 2e-3


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_has_the_same_losses_and_weights_to_the_last_digit(outcomes, ranks, run):
    result = outcomes[ranks][f"resume_{run}"]
    assert result["stopped"]
    assert result["at"] == {"epoch": 0, "step": 4}
    assert result["broken"] == result["straight"][:4]
    assert result["rest"] == result["straight"][4:]
    assert outcomes[ranks][f"equal_{run}"]


def test_a_stop_while_a_batch_does_not_come_saves_what_was_trained(outcomes, ranks):
    """One rank waits for batch 3, the other has it: neither trains on it, and it is the next one."""
    result = outcomes[ranks]["stalled"]
    assert result["stopped"]
    assert result["losses"] == outcomes[ranks]["resume_adagrad"]["straight"][:3]
    assert result["saved"] == {"epoch": 0, "step": 3}


@pytest.mark.parametrize("run", RUNS)
def test_two_ranks_learn_what_one_learns_and_one_takes_up_what_two_saved(outcomes, run):
    alone = outcomes[1][f"resume_{run}"]["straight"]
    assert outcomes[2][f"resume_{run}"]["straight"] == pytest.approx(alone, abs=1e-5)
    assert outcomes[1][f"taken_{run}"] == pytest.approx(alone[4:], abs=1e-5)


@pytest.mark.parametrize(
    ("model", "how"),
    [
        *((model, how) for model in ("bags", "dien") for how in KINDS),
        *(("dien, one table", how) for how in ("auto", "row")),
    ],
)
def test_every_kind_has_the_logits_and_gradients_of_the_unsharded_model(
    outcomes, ranks, how, model
):
    """Bags of no, one or several ids; a history with its loss, in a table of its own or the target's."""
    result = outcomes[ranks]["unsharded"][f"{model} {how}"]
    assert result["logits"] < 1e-6
    assert max(result["tables"], result["dense"]) < 1e-6
    assert result["moved"] > 1e-5


@pytest.mark.parametrize("was", ["column", "row", "data"])
@pytest.mark.parametrize(("ranks", "how"), ON_RANKS)
def test_a_checkpoint_is_the_same_under_another_sharding_and_on_other_ranks(
    outcomes, ranks, was, how
):
    """Element by element, and the evaluation. Row-wise states of a table cut by columns: the mean of its pieces'."""
    assert outcomes[ranks]["recut"][f"{was} {how}"] == []
    assert outcomes[ranks]["recut"]["column unlike"] > 0, (
        "all pieces have the same states, which proves nothing"
    )


def test_an_evaluation_covers_all_ranks_rows(outcomes, ranks):
    assert outcomes[ranks]["quality"]["rows"] == 3 * 64
    assert outcomes[ranks]["quality"]["logloss"] == pytest.approx(outcomes[ranks]["loss"], abs=1e-6)
    assert outcomes[ranks]["quality"]["auc"] == pytest.approx(
        outcomes[3 - ranks]["quality"]["auc"], abs=1e-4
    )


def test_a_padded_batch_has_the_gradient_of_its_real_rows_alone(outcomes, ranks):
    """Of 64 rows 20 are real: the second of two ranks has none. With steps that look ahead and without, for plain
    ids, bags and a history with its loss, with a decay of the vectors; in the padding lie numbers that are
    none, and ids."""
    for result in outcomes[ranks]["padded"]:
        assert max(result["gradients"], result["loss"]) < 1e-6
        assert result["moved"] > 1e-3
        assert result["rows"] == result["timed"] == 20


def test_steps_that_look_ahead_are_the_same_steps(outcomes, ranks):
    """TorchRec's pipeline has taken batches that are not trained yet: the position saved must not count them."""
    result = outcomes[ranks]["ahead"]
    assert len(result["plain"]) == 2 * 6 + 2 * 3
    assert result["ahead"] == result["plain"]
    assert result["differ"] == []
    assert result["at"] == {"epoch": 0, "step": 4}
    assert result["broken"] + result["rest"] == result["plain"][:12]


def test_a_batch_without_a_loss_is_left_out_on_all_ranks_as_if_it_had_not_come(outcomes, ranks):
    """Weights and states of tables and dense layers are equal to the last digit to a run that never got the batch."""
    result = outcomes[ranks]["extreme"]
    assert result["differ"] == []
    assert result["skipped"] == [[1, 12, 11 * 64]] * 2


def test_a_loss_that_is_no_number_ends_all_ranks_with_the_same_words(outcomes, ranks):
    result = outcomes[ranks]["extreme"]
    assert len(result["said"]) == 2 * ranks
    for text in result["said"]:
        assert_names(text, "nan at step 4", "'d1' holds 3e+38", "row 5")
    assert result["saved"] == 0
