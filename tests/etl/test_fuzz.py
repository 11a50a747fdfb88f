"""The fuzzers run for a minute with seeds that nobody knows before; a failure names the seed."""

from __future__ import annotations

import random
import time

import pytest

from tests.fuzz.__main__ import modules

# pyspark 4.1 leaves the sockets through which it collects to the garbage collector.
pytestmark = [pytest.mark.spark, pytest.mark.slow,
              pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]

SECONDS = 60.0


def test_specs_and_rows_that_are_drawn_now_are_the_same_in_every_way(spark, tmp_path_factory):
    began, seed, turns = time.monotonic(), random.SystemRandom().randrange(10**9), 0
    while time.monotonic() < began + SECONDS:
        for name, module in modules().items():
            found = module.try_seed(seed + turns, tmp_path_factory.mktemp(name))
            assert not found, f"make fuzz SEED={seed + turns} ONLY={name}: " + "\n".join(found)
        turns += 1
    assert turns
