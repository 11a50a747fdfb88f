"""Probabilities of a model whose table keeps only a share of the rows with label 0."""

from pathlib import Path

import numpy as np
import pytest

from tests.dlrm.forks import Forks
from tests.dlrm.rig import run_words
from tests.dlrm.serving.stub import body_of
from tests.etl.jobs import run
from tests.etl.tables import column, write_rows, write_spec
from tests.product import Scorer, Servable, Spec

KEPT, RATE = 0.25, 0.1
DRAWN = '[negatives]\ncolumn = "item"\n'


def spec(*rules: str) -> str:
    return write_spec(
        "click:int number:int item:int",
        *rules,
        column("number", "dense", "fill; scale, by = 10_000"),
        column("item", "sparse", "hash, size = 100"),
        table="split = {train = 0.9, validation = 0.1}",
    )


def sample(weight: str = "", kept: float = KEPT) -> str:
    return f"[sample]\nnegatives = {kept}\n" + (f'weight = "{weight}"\n' if weight else "")


@pytest.mark.parametrize(
    ("rules", "population"),
    [
        ((), "all"),
        ((sample("made_up_for"),), "all"),
        ((sample(kept=1),), "all"),
        ((sample(),), "sampled"),
        ((DRAWN,), "sampled"),
        ((sample("made_up_for"), DRAWN), "sampled"),
    ],
)
def test_a_spec_says_which_rows_its_probabilities_are_of(rules, population):
    assert Spec.own(spec(*rules)).rows.population == population


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["made_up_for", ""])
def test_probabilities_are_those_of_all_rows_or_the_answer_says_that_they_are_not(
    weight: str, tmp_path: Path, forks: Forks
):
    """By the mean over all rows, of which one in ten is clicked: in the sample, it is one in three."""
    draw = np.random.default_rng(7)
    count = 12_000
    columns = {
        "click": (draw.random(count) < RATE).astype(int),
        "number": np.arange(count),
        "item": draw.integers(50, size=count),
    }
    rows = write_rows(tmp_path / "rows.parquet", **columns)
    run(None, tmp_path / "table", rows, text=spec(sample(weight)))
    forks.train(*run_words(tmp_path, "--batch-size 64 --epochs 3"), tmp=tmp_path)
    servable = Servable.load(tmp_path / "run")
    asked = [{"number": n, "item": int(columns["item"][n])} for n in range(count)]
    (answer,) = Scorer(servable, most_rows=count).answer([body_of(*asked)])
    assert answer.population == ("all" if weight else "sampled")
    about = servable.about()
    assert (about["population"], about["kept_negatives"]) == (answer.population, KEPT)
    given = np.array(answer.probabilities)
    true = columns["click"].mean()
    if not weight:
        assert given.mean() > 2 * true
        given = KEPT * given / (KEPT * given + 1 - given)  # as docs/serving.md says
    assert abs(given.mean() - true) < 0.25 * true
