"""Compressed tables under a tower, on ranks: sharded, trained through the pipeline, saved and resumed like others."""

from __future__ import annotations

import pytest
import torch

from tests.dlrm.assembled_ranks import HALF
from tests.dlrm.rig import last_json, launch

KINDS = ["dcn", "deepfm"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each run's losses and weights: one rank all the way; two ranks half of it; one rank from what the two saved."""
    folder = tmp_path_factory.mktemp("assembled")

    def run(name, ranks, last, *start):
        (folder / name).mkdir()
        done = launch(ranks if ranks > 1 else 0, "tests.dlrm.assembled_ranks", folder / name, last, *start, tmp=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        found = last_json(done)
        return {kind: found[kind] | torch.load(folder / name / f"{kind}.pt", weights_only=True) for kind in KINDS}

    return {"alone": run("alone", 1, 2 * HALF), "two": run("two", 2, HALF),
            "resumed": run("resumed", 1, 2 * HALF, folder / "two")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_what_one_learns(runs, kind):
    alone, two = runs["alone"][kind], runs["two"][kind]
    assert {"big@0", "big@3", "mid@q", "mid@r", "small", "tiny"} <= set(two["tables"])
    assert two["losses"] == pytest.approx(alone["losses"][:HALF], abs=1e-5)
    for name, weight in two[f"after {HALF}"].items():
        other = alone[f"after {HALF}"][name]
        torch.testing.assert_close(weight, other, rtol=0, atol=5e-6, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_takes_up_what_two_saved(runs, kind):
    saved = runs["two"][kind][f"after {HALF}"]
    loaded = runs["resumed"][kind]["loaded"]
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_on_from_it_is_what_would_have_been(runs, kind):
    """States too: LAMB's, the tables', and the schedule's place."""
    assert runs["resumed"][kind]["losses"] == pytest.approx(runs["alone"][kind]["losses"][HALF:], abs=1e-5)
