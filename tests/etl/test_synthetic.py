"""Synthetic clicks: their shape, that seeds mean bytes, and that the planted model can be learned only with crosses."""

import math

import pytest

from sluice.etl.__main__ import main
from sluice.etl.synth.criteo import COLUMNS, INTEGERS
from tests.product import Clicks, synthesize


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


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesize(tmp_path / name, rows=500, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    always = [0.23376293958354755, 0.1865614566824453, 0.5747558801035214, 0.008217260928382725]
    assert Clicks(1).rows(0, 500).probability[:4].tolist() == pytest.approx(always, rel=1e-9)


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
