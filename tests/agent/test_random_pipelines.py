"""Random pipelines: what their splits have in common, and what not."""

import itertools

import numpy as np

from sluice.agent.lab.simulator.random_pipelines import FAMILIES, SPLITS, Draw
from tests.product import pipeline


def test_no_split_has_a_family_or_a_value_of_another():
    some = {split: [pipeline(split, number) for number in range(400)] for split in SPLITS}
    for split, other in itertools.combinations(SPLITS, 2):
        assert not FAMILIES[split].keys() & FAMILIES[other].keys()
        assert not {s.about.split(", ")[0] for s in some[split]} & {
            s.about.split(", ")[0] for s in some[other]
        }
    draws = [Draw(np.random.default_rng(split), split) for split in range(len(SPLITS))]
    cells = [
        {int(72 * np.log(draw.between(1.0, 8.0)) / np.log(8.0)) for _ in range(500)}
        for draw in draws
    ]
    assert [{cell % 3 for cell in used} for used in cells] == [{0}, {1}, {2}]
    assert all(len(used) == 24 for used in cells), "each covers the whole range"
