"""The fuzzer of values finds what is planted in it, and nothing in the code as it is."""

from __future__ import annotations

import pyarrow.compute as pc
import pytest

from sluice.etl.ops.base import as_text
from tests.fuzz import one_value
from tests.fuzz.seeds import seed_of_code


def local_seeds(begin: int, count: int) -> list[int]:
    seeds = range(begin, begin + 2 * count)
    return [seed for seed in seeds if seed % one_value.SPARK_EVERY][:count]


def test_drawn_values_are_the_same_in_every_way(tmp_path):
    for seed in local_seeds(seed_of_code(), 300):
        assert one_value.try_seed(seed, tmp_path) == [], f"make fuzz SEED={seed} ONLY=one_value"


@pytest.mark.parametrize(
    "mistake",
    [
        lambda columns: as_text(columns[0]),  # minus zero has another text
        lambda columns: as_text(pc.cast(columns[0], "float64", safe=False)),  # digits are lost
    ],
)
def test_a_mistake_in_keys_is_found(tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(one_value, "key_texts", lambda columns: _only_numbers(columns, mistake))
    assert any(one_value.try_seed(seed, tmp_path) for seed in local_seeds(1, 200))


def _only_numbers(columns, mistake):
    return as_text(columns[0]) if columns[0].type == "string" else mistake(columns)
