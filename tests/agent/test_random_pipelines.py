"""Random pipelines: what their splits have in common, and what not."""

from __future__ import annotations

import itertools

import numpy as np

from sluice.agent.lab.simulator.random_pipelines import FAMILIES, SPLITS, Draw, pipeline
from tests.raises import raises

SOME = {split: [pipeline(split, number) for number in range(400)] for split in SPLITS}


def test_no_split_has_a_family_or_a_value_of_another():
    for one, other in itertools.combinations(SPLITS, 2):
        assert not FAMILIES[one].keys() & FAMILIES[other].keys()
        assert not {s.about.split(", ")[0] for s in SOME[one]} & {
            s.about.split(", ")[0] for s in SOME[other]
        }
    draws = [Draw(np.random.default_rng(split), split) for split in range(len(SPLITS))]
    cells = [
        {int(72 * np.log(draw.between(1.0, 8.0)) / np.log(8.0)) for _ in range(500)}
        for draw in draws
    ]
    assert [{cell % 3 for cell in some} for some in cells] == [{0}, {1}, {2}]
    assert all(len(some) == 24 for some in cells), "each covers the whole range"


def test_a_number_is_always_the_same_pipeline_and_others_differ():
    again = pipeline("held out", 3)
    assert (again.stages, again.machine, again.consumer) == (
        SOME["held out"][3].stages,
        SOME["held out"][3].machine,
        SOME["held out"][3].consumer,
    )
    assert again.stages != SOME["held out"][4].stages
    with raises(ValueError, "'tests'", "training"):
        pipeline("tests", 0)
