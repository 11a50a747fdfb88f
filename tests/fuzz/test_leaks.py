"""The fuzzer of leaks finds what is planted in it, and nothing in the code as it is."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.etl.ops.statistics import Target
from sluice.etl.spec.spec import Spec
from tests.etl.jobs import run
from tests.etl.tables import column, write_rows
from tests.fuzz import leaks
from tests.fuzz.oracle import RuleRunner, Versions
from tests.fuzz.seeds import seed_of_code

pytestmark = pytest.mark.slow
LOCAL = [seed for seed in range(1, 400) if seed % leaks.SPARK_EVERY]
SEED = seed_of_code()


def first_found(tmp_path_factory: pytest.TempPathFactory, begin: int = 1) -> list[str]:
    """The findings of the first seed that has some."""
    tried = (
        leaks.try_seed(seed, tmp_path_factory.mktemp("seed")) for seed in LOCAL if seed >= begin
    )
    return next((findings for findings in tried if findings), [])


@pytest.mark.parametrize("turn", range(4))
def test_drawn_tables_have_no_leak(turn, tmp_path):
    seed = (SEED + turn) * leaks.SPARK_EVERY + 1 + turn
    assert leaks.try_seed(seed, tmp_path) == [], f"replay it with: make fuzz SEED={seed} ONLY=leaks"


def test_a_target_encoding_without_folds_is_found(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(
        Target,
        "_folds",
        lambda self, keys: np.where(
            keys.is_null().to_numpy(zero_copy_only=False), self.folds, np.arange(len(keys)) % 2
        ),
    )
    assert any("target" in finding for finding in first_found(tmp_path_factory))


def test_folds_that_are_drawn_anew_over_kept_sums_are_found(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(Spec, "learned_from_labels", frozenset())
    assert any("own label" in finding for finding in first_found(tmp_path_factory, 105))


def test_a_versions_rows_are_sought_among_its_own_input_alone(tmp_path):
    text = "\n".join(
        [
            '[input]\nformat = "parquet"\ncolumns = ["click:int", "price:float"]',
            "[table]\nsplit = {all = 1}",
            column("click", "label"),
            column("price", "dense", "fill"),
        ]
    )
    first, later = (
        str(write_rows(tmp_path / name, click=[0, 1, 0], price=[1.0] * 3))
        for name in ("first", "later")
    )
    run(None, tmp_path / "table", first, text=text)
    run(None, tmp_path / "table", later, text=text, mode="append")
    inputs, table = [[first], [first, later]], str(tmp_path / "table")
    versions = Versions(table, inputs, RuleRunner(leaks.engine(None), tmp_path))
    assert versions.part(0).row_numbers.tolist() == [0, 1, 2]
    assert versions.part(0).written.all()
    # Its columns hold all rows, because histories need the earlier ones.
    assert versions.part(1).row_numbers[versions.part(1).written].tolist() == [3, 4, 5]
