"""What an evaluation finds, and what is made of it, with a model that says what it is given."""

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from sluice.dlrm.evaluation import validation
from sluice.dlrm.evaluation.diagnosis import telling_columns, too_good
from sluice.dlrm.evaluation.predictions import PredictionError, figures_of
from sluice.dlrm.evaluation.split import SingleColumns, evaluate
from tests.dlrm.rig import META, Alone, FakeBatch, FakeSplit
from tests.product import (
    CheckpointDisk,
    CheckpointMeta,
    Config,
    Journal,
    SyncedBatches,
    Table,
    Validator,
    best,
    quality,
)
from tests.raises import assert_names, raises

SIZES = {"few": 3, "one": 9, "bag": 9}


def at(step: int) -> CheckpointMeta:
    return replace(META, step=step)


def told(b):
    return b.dense[:, 0]


PARTS = SimpleNamespace(
    model=lambda logits, _sparse: logits,
    layout=SimpleNamespace(
        features=lambda b: (b.dense[:, 0], None),
        columns=[Table(name=n, rows=r, width=4) for n, r in SIZES.items()],
    ),
)


def split(*, rows: int = 64, batches: int = 3, sense: float = 1.0) -> FakeSplit:
    """The first dense feature is the logit; `sense` says how much labels follow it. The last batch is half filling."""
    random = torch.Generator().manual_seed(3)
    batches_made = []
    for step in range(batches):
        logits = torch.randn(rows, generator=random)
        label = (torch.rand(rows, generator=random) < torch.sigmoid(3 * sense * logits)).float()
        few = torch.randint(0, 3, (rows,), generator=random)
        lengths = torch.stack([torch.ones(rows), torch.ones(rows), torch.arange(rows) % 3]).int()
        bag = torch.randint(0, 9, (int(lengths[2].sum()),), generator=random)
        weight, same = torch.ones(rows), torch.full((rows,), 5)
        if step == batches - 1:
            weight[rows // 2 :] = 0
            few[rows // 2 :] = 2
            same[rows // 2 :] = 8
        batches_made.append(
            FakeBatch(
                dense=torch.stack([logits, torch.full((rows,), -2000.0)], 1),
                label=label,
                weight=weight,
                values=torch.cat([few, same, bag]).int(),
                lengths=lengths.flatten(),
                rows=rows,
                step=step,
            )
        )
    return FakeSplit(batches_made, dense_names=("d0", "d1"), sparse_names=tuple(SIZES))


def findings(feed: FakeSplit, world=Alone, **how):
    return evaluate(PARTS, feed, "fake", world(), **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("column", "name"),
    [("number", "d1"), ("turned", "d1"), ("ids", "few"), ("bag", "bag"), ("none", "")],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_column_that_alone_predicts_the_label_is_found_on_any_number_of_ranks(
    column, name, ranks
):
    """Of ids it is what half of the rows shows of the others: ids that are all different say nothing."""
    parts = []
    for rank in range(ranks):
        alone = SingleColumns(("d0", "d1"), tuple(SIZES), SimpleNamespace(ranks=ranks))  # type: ignore[arg-type]
        for step, drawn in enumerate(split(batches=6, sense=0.2).batches[rank::ranks]):
            bags = torch.split(drawn.values, drawn.lengths.view(3, -1).sum(1).tolist())
            few, unique, bag = (ids.clone() for ids in bags)
            label = drawn.label
            unique = torch.arange(len(label)) + 1000 * (step * ranks + rank)
            if column in ("number", "turned"):
                drawn.dense[:, 1] = (label + torch.rand(len(label)) / 2) * (
                    1 if column == "number" else -1
                )
            if column == "ids":
                few = label.int() + 1
            if column == "bag":
                bag = label.repeat_interleave(drawn.lengths.view(3, -1)[2].long()).int() + 1
            if column == "none":
                drawn.dense[:, 1] = torch.rand(len(label))
            alone.add(replace(drawn, values=torch.cat([few, unique, bag]).int()))
        parts.append(np.concatenate(alone._parts, axis=1))
    alone._world = SimpleNamespace(gather_objects=lambda _: parts)  # type: ignore[assignment]
    explained = alone.result()
    if column == "bag":
        assert next(iter(explained)) == "bag", "rows whose bag is empty are not told by it"
    elif name:
        assert [key for key in explained if explained[key] > 0.98] == [name]
    else:
        assert max(explained.values()) < 0.9
    assert explained["one"] < 0.6


def test_a_column_that_predicts_the_label_alone_is_warned_of():
    (text,) = telling_columns({"refund": 0.991, "price": 0.98}, "validation")
    assert_names(text, "'refund'", "AUC 0.9910", "validation")
    assert too_good(0.9989, {"refund": 0.97}) is None
    assert_names(too_good(0.999, {"refund": 0.97, "price": 0.6}), "'refund'", "0.9700")
    assert "label" in too_good(1.0, {})


def test_beyond_the_stated_size_logits_are_counted_in_bins():
    feed = split(rows=256, batches=8)
    exact, rough = findings(feed), findings(feed, exact_rows=100)
    logits, labels = (
        torch.cat([part(b)[b.weight > 0] for b in feed.batches]).double().numpy()
        for part in (told, lambda b: b.label)
    )
    assert exact.quality == quality(logits, labels, labels**0)
    assert exact.positives == int(labels.sum())
    a, b = exact.quality.to_dict(), rough.quality.to_dict()
    assert 0 < abs(a.pop("auc") - b.pop("auc")) < 2e-4
    assert b == pytest.approx(a, rel=1e-12)
    assert (exact.positives, exact.spread) == (rough.positives, rough.spread)


def test_figures_are_given_for_at_most_a_thousand_values():
    table = pa.table({"user": range(1001)})
    with raises(PredictionError, "--by user", "1,001 values", "at most 1,000"):
        figures_of(table, "user")


class Two(Alone):
    """The other rank has the same rows."""

    ranks = 2

    def gather_objects(self, value, _group=None):
        return super().gather_objects(value) * 2


def test_the_rows_of_all_ranks_count_for_the_stated_size():
    """If only those of one rank did, both would be exact, and the same."""
    exact, two = (
        findings(split(rows=256, batches=8), world, exact_rows=2048) for world in (Alone, Two)
    )
    assert exact.quality.auc != two.quality.auc


def test_what_would_explain_a_useless_model_is_seen():
    seen = findings(split())
    assert (seen.constant, seen.columns) == (("one",), 3)
    assert seen.largest_dense == ("d1", 2000.0)


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A judge over a made-up split, and what it wrote."""
    lines = SimpleNamespace(said=[], metrics=[], events=[])
    journal = Journal()
    vars(journal).update(
        say=lines.said.append, metric=lines.metrics.append, event=lines.events.append
    )
    shown = {"sense": 1.0}

    @contextmanager
    def evaluation(*_args, **_how):
        yield split(sense=shown["sense"])

    monkeypatch.setattr(validation.loaders, "evaluation", evaluation)

    def make(asked_to_stop=lambda: False, **settings):
        return Validator(
            config=Config(data="t", version=0, stuck_after=10, **settings),
            parts=PARTS,
            world=Alone(),
            table=SimpleNamespace(splits=("train", "validation")),
            journal=journal,
            steps_per_epoch=20,
            synced_batches=SyncedBatches(Alone(), asked_to_stop),
            checkpoints=SimpleNamespace(
                wait=lambda: None,
                folder=tmp_path,
                path=tmp_path / "step-000000010",
                files=CheckpointDisk(),
            ),
        )

    return make, lines, shown, tmp_path


def test_a_stop_ends_an_evaluation_and_leaves_nothing_of_it(judged):
    make, lines, _, folder = judged
    looks: list[int] = []

    def asked_to_stop():
        looks.append(len(looks))
        return len(looks) > 2  # once before a batch is fetched and once after it

    assert not make(asked_to_stop=asked_to_stop).evaluate_and_check(at(10))
    assert len(looks) == 4  # of three batches, one was looked at
    assert (lines.metrics, lines.said, best(folder)) == ([], [], None)


def test_the_best_checkpoint_is_marked_and_a_worse_one_is_not(judged):
    make, lines, shown, folder = judged
    judge = make()
    assert not judge.evaluate_and_check(at(10))
    first = best(folder)
    assert first[0].name == "step-000000010"
    shown["sense"] = 0.2
    assert not judge.evaluate_and_check(at(20))
    assert best(folder) == first
    assert [m["step"] for m in lines.metrics] == [10, 20]
    assert_names(lines.said[0], "validation", "0.5 epochs", "auc")
    # A newer version began at step 22.
    judge.evaluate_and_check(replace(at(47), epoch=1, since=22))
    assert any("1.25 epochs" in line for line in lines.said)


def test_training_may_end_at_the_auc_that_was_asked_for(judged):
    make, lines, *_ = judged
    assert make(stop_auc=0.8).evaluate_and_check(at(10))
    judge = make(stop_auc=lines.metrics[0]["auc"] + 1e-3)
    assert not judge.evaluate_and_check(at(10))
    assert [e["kind"] for e in lines.events] == ["reached"]


def test_predictions_that_are_no_numbers_are_never_the_best(judged, monkeypatch):
    make, lines, _, folder = judged
    numbers = iter([math.nan] * 3)  # of three batches
    monkeypatch.setattr(PARTS, "model", lambda logits, _sparse: logits * next(numbers, 1.0))
    judge = make(stop_auc=0.8)
    assert not judge.evaluate_and_check(at(10))
    assert best(folder) is None
    assert lines.metrics[0]["auc"] is None
    json.dumps(lines.metrics, allow_nan=False)
    (warning,) = (e["text"] for e in lines.events)
    assert_names(warning, "step 10", "'validation'", "not a number", "2000 in 'd1'")
    assert judge.evaluate_and_check(at(20))
    assert best(folder) is not None


def test_a_model_at_chance_is_a_warning_with_likely_causes(judged):
    make, lines, shown, _ = judged
    shown["sense"] = 0.0
    make().evaluate_and_check(at(9))
    assert not lines.events
    make().evaluate_and_check(at(10))
    assert lines.events[0]["kind"] == "warning"
    assert "column 'd1' reaches 2000" in lines.events[0]["text"]


def test_a_score_that_has_been_falling_for_a_third_of_an_epoch_is_one_warning(judged):
    """20 steps an epoch: 6 steps after the best are too few for a warning, 7 are not. The fall is reported once."""
    make, lines, shown, _ = judged
    judge = make()
    for step, sense in ((10, 1.0), (16, 0.3), (17, 0.3), (24, 0.3), (30, 1.5), (40, 0.45)):
        shown["sense"] = sense
        judge.evaluate_and_check(at(step))
    assert [(e["kind"], e["step"]) for e in lines.events] == [("warning", 17), ("warning", 40)]
    texts = [e["text"] for e in lines.events]
    assert_names(texts[0], "step 10", "learning rate")
    assert "learned by heart" in texts[1]


def test_a_trained_model_whose_predictions_are_off_is_a_warning_at_its_end(judged):
    make, lines, shown, _ = judged
    judge, shown["sense"] = make(), -1.0
    judge.evaluate_and_check(at(5))
    assert not lines.events
    judge.conclude(at(5))
    assert [e["kind"] for e in lines.events] == ["warning"]
    assert_names(lines.events[0]["text"], "validation", "above 1")
