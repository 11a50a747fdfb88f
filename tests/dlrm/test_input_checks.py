import pytest
import torch

from sluice.dlrm.training.input_checks import BadData, BatchChecker
from tests.dlrm.rig import DENSE, SIZES, bagged, batch
from tests.raises import raises


def check(b):
    BatchChecker(SIZES, DENSE, "train").check(b)


def test_good_batches_pass():
    for step in range(5):
        check(batch(step, 64))


@pytest.mark.parametrize(
    ("lengths", "values", "bad"),
    [
        ([2, 0, 1, 3, *[0] * 4, *[1] * 4, 0, 0, 0, 1], [1, 2, 3, 4, 5, 6, 0, 1, 2, 6, 2], -1),
        # As many ids as rows: one column's long bags make up for another's empty ones.
        ([*[2] * 4, *[0] * 4, *[1] * 8], [*[3999] * 8, *[6] * 4, *[2] * 4], 3),
    ],
)
def test_an_id_in_a_bag_is_found(lengths, values, bad):
    b = batch(0, 4)
    b.lengths = torch.tensor(lengths, dtype=torch.int32)
    b.values = torch.tensor(values, dtype=torch.int32)
    check(b)
    b.values[-1] = bad
    with raises(BadData, "'tiny'", f"id {bad}"):
        check(b)


@pytest.mark.parametrize("bad", [2.0, 0.5, -1.0, float("nan")])
def test_a_label_must_be_0_or_1(bad):
    b = batch(0, 64)
    b.label[7] = bad
    with raises(BadData, "neither 0 nor 1"):
        check(b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_feature_that_is_no_number_is_named(bad):
    b = batch(0, 64)
    b.dense[9, 1] = bad
    with raises(BadData, "'d1'"):
        check(b)


def test_finite_features_whose_sum_is_not_are_no_error():
    b = batch(0, 64)
    b.dense[:, 0] = 3e38
    check(b)


def test_a_bad_value_is_named_with_the_row_that_it_comes_from():
    """Of an id in a bag, too."""

    def placed(b):
        return BatchChecker(
            SIZES, DENSE, "train", place_of=lambda *place: f"{b.step} {place}"
        ).check(b)

    for spoil, row in (
        (lambda b: b.label.__setitem__(7, 3), 7),
        (lambda b: b.dense.__setitem__((9, 1), torch.nan), 9),
        (lambda b: b.values.__setitem__(64 + 5, 300), 5),
    ):
        b = batch(3, 64)
        spoil(b)
        with raises(BadData, f"step 3 of train; 3 (0, 3, {row})"):
            placed(b)
    b = bagged(batch(3, 64), 3)
    last = int(b.lengths.view(4, 64)[2].nonzero()[-1])
    b.values[64 + 64 + int(b.lengths.view(4, 64)[2].sum()) - 1] = 7
    with raises(BadData, "'small'", "id 7", f"3 (0, 3, {last})"):
        placed(b)


def test_the_largest_numbers_are_remembered_with_their_place():
    checker = BatchChecker(SIZES, DENSE, "train", place_of=lambda *place: f"at {place}")
    for step in range(12):
        b = batch(step, 64)
        if step == 2:
            b.dense[4, 1] = -500.0
        if step == 10:
            b.dense[5, 2], b.dense[6, 0] = -3e38, 2e6
        checker.check(b)
    largest = checker.largest()
    assert (largest["d0"], largest["d1"], largest["d2"], largest["weight"]) == (
        2e6,
        500.0,
        pytest.approx(3e38),
        1.0,
    )
    assert checker.extremes() == [
        {"batch": [0, 10], "column": "d2", "value": pytest.approx(-3e38), "where": "at (0, 10, 5)"}
    ]
