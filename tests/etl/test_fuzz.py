"""The fuzzers run for ten seconds; a failure names the seed.

The code of the product and of the fuzzers draws the first seed: every change of it tries seeds that nobody chose. The
same code always tries the same seeds, so that a commit that passed once is not refused later for a seed that nobody
saw. `make fuzz` begins with the same seed and goes on for longer; `FIRST=n` tries others.
"""

import time

import pytest

from tests.fuzz.__main__ import modules
from tests.fuzz.seeds import seed_of_code

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
]

SECONDS = 10.0


def test_specs_and_rows_that_are_drawn_now_are_the_same_in_every_way(spark, tmp_path_factory):
    began, seed, turns = time.monotonic(), seed_of_code(), 0
    while time.monotonic() < began + SECONDS:
        for name, module in modules().items():
            findings = module.try_seed(seed + turns, tmp_path_factory.mktemp(name))
            assert not findings, f"make fuzz SEED={seed + turns} ONLY={name}: " + "\n".join(
                findings
            )
        turns += 1
    assert turns
