"""Functions that take a matrix of equal columns: the same rows as functions over single columns, in every back end."""

import numpy as np
import pytest

from sluice import Errors, Knobs, Transform, takes_matrix
from tests.dlrm import clicks_table
from tests.ingest.test_backend import NAME, all_of, loading
from tests.ingest.test_backend import contents as contents_of
from tests.open_loader import open_loader
from tests.product import TransformError
from tests.raises import raises

pytestmark = pytest.mark.slow

THREAD, PROCESS = Knobs(), Knobs(backend={"mine": "process"})
both = pytest.mark.parametrize("knobs", [THREAD, PROCESS])


def first_batch(table, function, knobs=THREAD, **how):
    given = Transform(function, "mine", **how) if how else function
    with loading(table, given, knobs) as loader:
        return next(iter(loader))


@both
@pytest.mark.parametrize("function", ["log_in_place", "log_anew", "log_as_float64"])
def test_a_matrix_gives_the_same_batches_and_order_as_its_columns_one_by_one(
    table, function, knobs, monkeypatch
):
    with loading(table, NAME + "log_by_column", THREAD) as loader:
        expected = all_of(loader)
    monkeypatch.setattr("sluice.ingest.stages.transformer._check_ids", None)  # it gets no ids
    with loading(table, NAME + function, knobs) as loader:
        assert all_of(loader) == expected


@both
@pytest.mark.parametrize(
    "columns", [("I3", "I4", "I5"), ("I9", "I2"), ("C4", "C5"), ("C7", "C2", "C3"), ("I1",)]
)
def test_columns_come_in_the_order_in_which_they_are_named(table, columns, knobs):
    before = first_batch(table, lambda arrays: None)
    batch = first_batch(table, NAME + "numbered_columns", knobs, reads=columns)
    for name in before.names:
        changed = np.full(80, columns.index(name)) if name in columns else before[name]
        assert (batch[name].numpy() == np.asarray(changed)).all(), name


@both
def test_rows_on_which_it_fails_are_quarantined_and_unchanged(table, knobs, tmp_path):
    def epoch_of(function, number):
        errors = Errors(
            on_error="quarantine", max_rate=1.0, quarantine=tmp_path / f"{number}.jsonl"
        )
        with loading(table, NAME + function, knobs, errors=errors, batch_size=800) as loader:
            batches = list(map(contents_of, loader))
            return batches, loader.order_hash, loader.quarantined["rows_set_aside"]

    expected = epoch_of("log_by_column_but_fails", 0)
    assert expected[2] > 0
    assert epoch_of("log_but_fails", 1) == expected


@both
@pytest.mark.parametrize(
    ("function", "how", "facts"),
    [
        ("one_row_less", {}, ("'I1'", "(79,)", "(80,)")),
        ("sums", {}, ("'I1'", "()", "(80,)")),
        ("too_large", {}, ("column 'I3'", "1e+300")),
        ("beyond_cardinality", {"reads": ("C1", "C2")}, ("column 'C2'", "number 5", 2**30)),
    ],
)
def test_a_result_that_does_not_fit_is_refused_by_name(table, function, how, facts, knobs):
    with raises(TransformError, "'mine'", "epoch 0, step 0", *facts):
        first_batch(table, NAME + function, knobs, **{"reads": (), **how})


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ({"reads": ("I1", "C1")}, ("'C1'", "float64", "int32")),
        ({"reads": ("I1",), "outputs": {"new": None}, "added": ("new",)}, ("'new'",)),
        ({"reads": ("I1", "Z9")}, ("'Z9'",)),
    ],
)
def test_columns_that_make_no_matrix_are_refused(table, how, facts):
    with raises(TransformError, "'mine'", *facts):
        first_batch(table, takes_matrix(lambda numbers: None), **how)


CHAIN = '[[transform]]\nname = "log_{0}"\ninputs = ["{0}"]\nop = "log"\n'
HASH = '[[transform]]\nname = "h_{0}"\ninputs = ["{0}"]\nop = "hash"\nsize = {1}\n'


def spec_table(folder, transforms):
    text = clicks_table.spec_text(features=clicks_table.FEATURES + "".join(transforms))
    return clicks_table.write(folder, clicks_table.raw_rows(900), text=text)


def test_equal_operators_of_a_spec_run_as_one_and_give_the_same(tmp_path):
    numbers = [CHAIN.format(name) for name in ("I2", "number", "I1")]
    ids = [HASH.format(name, 40) for name in ("C5", "C1")]
    adjacent = spec_table(tmp_path / "a", [*numbers, *ids])
    apart = spec_table(tmp_path / "b", [numbers[0], ids[0], numbers[1], ids[1], numbers[2]])
    batches = []
    for table, names in (
        (adjacent, ["log_I2+log_number+log_I1", "h_C5+h_C1"]),
        (apart, ["log_I2", "h_C5", "log_number", "h_C1", "log_I1"]),
    ):
        with open_loader(table, batch_size=80) as loader:
            assert [transform.name for transform in loader._input.transforms] == names
            batches.append(list(map(contents_of, loader)))
    assert batches[0] == batches[1]
