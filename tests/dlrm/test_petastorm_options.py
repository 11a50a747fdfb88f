"""What Petastorm's Reader is asked for on the trainer's command line: which rows and columns a run then has, on any
number of ranks and after it was interrupted."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from benchmarks.small_table import small_table
from sluice.dlrm import evaluate, train
from sluice.dlrm.options import Config
from sluice.dlrm.training import loaders
from sluice.etl.spec.permission import Permission
from sluice.etl.table.table import FeatureTable
from sluice.ingest.errors import LoaderError
from tests.dlrm.hostile_table import ended
from tests.dlrm.rig import SMALL_MODEL, last_json
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow

MODULE = "tests.dlrm.petastorm_parts"
BATCH = 64
SMALL = (
    "--batch-size",
    BATCH,
    *SMALL_MODEL,
    "--tuning",
    "fixed",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table of 1,600 training rows in 13 row groups, in which I1 is each row's number."""
    path = tmp_path_factory.mktemp("asked") / "table"
    small_table(path, rows=2000, values=50, files=2, row_group_rows=128, number_rows=True)
    return path


@pytest.fixture
def opened(folder, tmp_path):
    """Makes the loaders of all ranks of a run with these options."""
    with ExitStack() as open_loaders:

        def make(ranks=1, split="train", **asked):
            named = {option: f"{MODULE}:{function}" for option, function in asked.items()}
            config = Config(data=str(folder), version=0, batch_size=BATCH, ranks=ranks, **named)
            table = config.changed_table(
                FeatureTable.open(
                    folder, allow_code=Permission(functions=frozenset(named.values()))
                )
            )
            if split != "train":
                found = [loaders.evaluation(config, table, split, rank=0, local_ranks=1)]
            else:
                found = [
                    loaders.training(
                        config,
                        table,
                        rank=rank,
                        local_ranks=ranks,
                        conditions=loaders.conditions(config, tmp_path, rank),
                    )
                    for rank in range(ranks)
                ]
            return [open_loaders.enter_context(one) for one in found]

        yield make


def row_numbers(batch):
    return batch.dense[:, 0][batch.weight > 0].int().tolist()


def global_batches(ranks):
    """The rows of each step, of all ranks together."""
    return [
        [row for batch in step for row in row_numbers(batch)] for step in zip(*ranks, strict=True)
    ]


def all_rows(loaders):
    return sorted(row for step in global_batches(loaders) for row in step)


def test_a_predicate_gives_the_same_batches_on_two_ranks_and_after_an_interruption_on_one(opened):
    whole = global_batches(opened(predicate="even_rows"))
    assert sorted(row for step in whole for row in step) == list(range(0, 1600, 2))
    assert [sorted(step) for step in global_batches(opened(ranks=2, predicate="even_rows"))] == [
        sorted(step) for step in whole
    ]
    two = opened(ranks=2, predicate="even_rows")
    epochs = [iter(one) for one in two]
    begun = [[row for epoch in epochs for row in row_numbers(next(epoch))] for _ in range(5)]
    (resumed,) = opened(predicate="even_rows")
    resumed.load_state_dict(two[0].state_dict())
    assert [sorted(step) for step in begun + global_batches([resumed])] == [
        sorted(step) for step in whole
    ]


@pytest.mark.parametrize(
    ("other", "facts"),
    [
        ({"predicate": "odd_rows"}, ["predicate"]),
        ({}, ["predicate", "None here"]),
        ({"predicate": "even_rows", "rowgroup_selector": "FirstGroups"}, []),
    ],
)
def test_a_state_is_refused_by_other_rows_even_if_they_are_as_many(opened, other, facts):
    (loader,) = opened(predicate="even_rows")
    state = loader.state_dict()
    opened(predicate="even_rows")[0].load_state_dict(state)
    with raises(LoaderError, "belongs to other rows", *facts):
        opened(**other)[0].load_state_dict(state)


def test_a_selector_chooses_among_training_rows_alone(opened):
    assert all_rows(opened(rowgroup_selector="FirstGroups")) == list(range(256))
    for asked in ({}, {"rowgroup_selector": "FirstGroups"}, {"predicate": "even_rows"}):
        assert all_rows(opened(split="validation", **asked)) == list(range(1600, 1800))


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--predicate", "nowhere"), ["--predicate", "'nowhere'", "module:function"]),
        (("--predicate", f"{MODULE}:text"), ["'I1 > 3'", "petastorm.predicates.PredicateBase"]),
        (
            ("--predicate", f"{MODULE}:even_rows", "--rowgroup-cache", f"{MODULE}:Kept"),
            ["cache row groups"],
        ),
        (
            ("--predicate", f"{MODULE}:even_rows", "--reader", "arrow"),
            ["--predicate", "--reader petastorm"],
        ),
        (("--predicate", f"{MODULE}:even_rows", "--sample", "I2"), ["sampled"]),
        (("--predicate", f"{MODULE}:even_rows", "--workers", "local:1"), ["Petastorm's Reader"]),
        (("--transform-spec", f"{MODULE}:edited_ids"), ["edit_fields", "'C1'"]),
    ],
)
def test_what_cannot_be_is_refused_before_training(folder, tmp_path, capsys, words, facts):
    code = ended(
        train.main, *f"--data {folder} --run-dir {tmp_path}/run".split(), *SMALL, "--check", *words
    )
    error = capsys.readouterr().err
    assert_names(error, *facts)
    assert code == 2, error
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch of torchrec
def test_a_run_that_pauses_ends_like_one_that_does_not_and_asks_for_the_code_again(
    folder, tmp_path, forks, capsys
):
    asked = ("--predicate", f"{MODULE}:even_rows", "--transform-spec", f"{MODULE}:halved_and_sum")
    begin = ("--data", folder, *SMALL, "--epochs", 2, *asked)
    straight = forks.train("--run-dir", tmp_path / "straight", *begin, tmp=tmp_path)
    forks.train("--run-dir", tmp_path / "paused", *begin, "--pause-after", 1, tmp=tmp_path)
    go_on = ("--run-dir", tmp_path / "paused", "--resume")
    refused = forks.train(*go_on, tmp=tmp_path, code=2)
    assert_names(refused.stderr, "--transform-spec", f"'{MODULE}:halved_and_sum'")
    other = forks.train(*go_on, "--predicate", f"{MODULE}:odd_rows", tmp=tmp_path, code=2)
    assert_names(other.stderr, "--resume", "predicate", f"'{MODULE}:even_rows'")
    resumed = forks.train(*go_on, *asked, tmp=tmp_path)
    wanted, found = last_json(straight), last_json(resumed)
    assert found["rows_trained"] == wanted["rows_trained"] == 1600
    assert found["auc"] == pytest.approx(wanted["auc"], abs=1e-9)
    capsys.readouterr()
    assert ended(evaluate.main, *f"--run-dir {tmp_path}/paused --allow-code {MODULE}".split()) == 0
    judged = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert judged["rows"] == 200, "a predicate leaves out no row of a test"
    assert judged["auc"] == pytest.approx(wanted["auc"], abs=1e-9)
