"""Synthetic clicks: their shape, that seeds mean bytes, and that the planted model can be learned only with crosses."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from sluice.etl.__main__ import main
from sluice.etl.synth import raw_logs
from sluice.etl.synth.criteo import CATEGORIES, COLUMNS, INTEGERS, BestAUC, Clicks
from sluice.etl.synth.raw_logs import synthesize
from sluice.etl.table_commands import FORMATS
from tests.etl.tables import auc


def share_null(rows, name):
    return rows.nulls[name].mean() if name in rows.nulls else 0.0


def test_the_shape_is_that_of_real_logs():
    rows = Clicks(5).rows(0, 10_000)
    for block in (
        ("I1", "I10"),
        ("I4", "I13"),
        ("I7", "I9", "I11"),
        ("C3", "C4", "C12", "C16", "C21", "C24"),
        ("C19", "C20", "C25", "C26"),
    ):
        assert all((rows.nulls[name] == rows.nulls[block[0]]).all() for name in block)
    assert share_null(rows, "C22") == pytest.approx(0.818, abs=0.02)
    assert share_null(rows, "I2") == 0
    assert rows.counts["I2"].min() == -2
    assert 0.08 < (rows.counts["I2"] == -1).mean() < 0.11
    assert all(rows.counts[name].min() >= 0 for name in INTEGERS if name != "I2")
    assert rows.counts["I10"].max() == 6
    assert rows.label.mean() == pytest.approx(0.25, abs=0.02)
    distinct, single = 0, 0
    for name in CATEGORIES:
        _, times = np.unique(
            rows.codes(name)[~rows.nulls.get(name, np.zeros(10_000, bool))], return_counts=True
        )
        distinct, single = distinct + len(times), single + (times == 1).sum()
    assert 40_000 < distinct < 48_000
    assert 0.65 < single / distinct < 0.76
    for name in ("C9", "C20"):
        assert len(np.unique(rows.ranks[name])) == 3
    assert (rows.ranks["C9"] == 0).mean() == pytest.approx(0.89, abs=0.02)


def test_later_days_bring_values_never_seen():
    clicks = Clicks(5)
    first, same, later = (
        clicks.rows(0, 5000),
        clicks.rows(5000, 5000),
        clicks.rows(5000, 5000, day=1),
    )
    seen = first.codes("C7")
    assert np.isin(later.codes("C7"), seen).mean() < np.isin(same.codes("C7"), seen).mean() - 0.05
    assert np.isin(later.codes("C9"), first.codes("C9")).all()


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path, form):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesize(tmp_path / name, rows=500, seed=seed, form=form)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("form", ["tsv", "json"])
def test_chunks_do_not_show(tmp_path, monkeypatch, form):
    whole = synthesize(tmp_path / "whole", rows=1000, seed=1, form=form)
    monkeypatch.setattr(raw_logs, "_CHUNK", 97)
    parts = synthesize(tmp_path / "parts", rows=1000, seed=1, form=form)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()
    assert whole == parts


def test_all_formats_say_the_same(tmp_path):
    for form in FORMATS:
        synthesize(tmp_path / form, rows=300, seed=4, form=form)
    want = pq.read_table(tmp_path / "parquet").to_pylist()
    tsv = [line.split("\t") for line in (tmp_path / "tsv").read_text().splitlines()]
    assert [[str(v) if v is not None else "" for v in row.values()] for row in want] == tsv
    assert [line.split(",") for line in (tmp_path / "csv").read_text().splitlines()] == tsv
    objects = [json.loads(line) for line in (tmp_path / "json").read_text().splitlines()]
    assert [{k: v for k, v in row.items() if v is not None} for row in want] == objects


def test_numbers_are_written_as_people_write_them():
    values = np.array([0, 7, -2, 10, 9999, 10_000, 10_001, 1_618_112, 99_999_999])
    assert [bytes(row[row != 0]).decode() for row in raw_logs._digits(values)] == [
        str(v) for v in values
    ]


def test_days_are_files_of_one_stream(tmp_path):
    result = synthesize(tmp_path / "days", rows=1000, seed=1, days=3)
    lines = [(tmp_path / "days" / f"day_{d}.tsv").read_text().splitlines() for d in range(3)]
    assert [len(part) for part in lines] == [333, 333, 334]
    assert result["bytes"] == sum(f.stat().st_size for f in (tmp_path / "days").iterdir())


def test_the_best_auc_is_the_expected_auc_of_the_true_probabilities():
    probability = np.random.default_rng(0).uniform(0.05, 0.9, 400)
    best = BestAUC()
    best.add(probability[:100])
    best.add(probability[100:])
    pairs = np.subtract.outer(probability, probability)
    wins = (pairs > 0) + 0.5 * (pairs == 0)
    weight = np.outer(probability, 1 - probability)
    np.fill_diagonal(weight, 0)
    assert best.value == pytest.approx((wins * weight).sum() / weight.sum(), abs=2e-3)


def test_a_model_without_crosses_misses_the_best_auc():
    """The best additive model is bounded from above: by the additive part of the true logit, effect by effect."""
    clicks = Clicks(1)
    rows = clicks.rows(0, 60_000)
    truth = np.log(rows.probability / (1 - rows.probability))
    # Least squares on the one-hot columns that the planted model uses, straight to the true logit: no noise of labels.
    residual = truth - truth.mean()
    additive = np.zeros_like(residual)
    features = [
        np.digitize(rows.counts[n], np.quantile(rows.counts[n], np.linspace(0, 1, 30)[1:-1]))
        for n in INTEGERS
    ]
    features = [
        np.where(rows.nulls.get(n, False), 31, f) for n, f in zip(INTEGERS, features, strict=True)
    ]
    features += [
        np.where(rows.nulls.get(n, False), 600, np.minimum(rows.ranks[n], 599)) for n in CATEGORIES
    ]
    for _ in range(6):
        for feature in features:
            step = np.bincount(feature, residual, 601) / np.maximum(
                np.bincount(feature, minlength=601), 1
            )
            additive += step[feature]
            residual -= step[feature]
    assert auc(truth, rows.label) - auc(additive, rows.label) > 0.03


def test_the_program_says_what_it_wrote(tmp_path, capsys):
    result = main(
        ["synth", "--rows", "2000", "--seed", "3", "--out", str(tmp_path / "deep" / "x.tsv")]
    )
    assert result["rows"] == 2000
    assert result["bytes"] == (tmp_path / "deep" / "x.tsv").stat().st_size
    assert 0.7 < result["bayes_auc"] < 0.95
    assert not math.isnan(result["label_rate"])
    assert "2,000 rows" in capsys.readouterr().err
    first = (tmp_path / "deep" / "x.tsv").read_text().splitlines()[0].split("\t")
    assert len(first) == len(COLUMNS)
