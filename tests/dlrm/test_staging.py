"""Training whose batches go through pinned buffers to a device that copies late."""

from __future__ import annotations

import pytest
import torch

from sluice.dlrm.ranks import world
from sluice.dlrm.training import overlapped_steps
from sluice.ingest.gpu import PinnedStaging
from tests.dlrm.ranks import trained, whole_weights
from tests.late_device import LateLane

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Losses and weights of a short training; `lane` is its way to the device."""

    def train(name: str, lane: LateLane | None):
        staging = None if lane is None else PinnedStaging(lane)
        monkeypatch.setattr(overlapped_steps, "staging_for", lambda _: staging)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        with world() as here:
            losses, parts, _ = trained(here, "auto", tmp_path / name, ahead=True)
            return losses, whole_weights(parts.model, here)

    return train


def is_same(one, other) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][k], other[1][k]) for k in one[1])


def test_training_from_buffers_that_are_used_again_is_the_same_to_the_last_digit(run):
    lane = LateLane()
    assert is_same(run("late", lane), run("plain", None))
    assert 0 < lane.made < len(lane.copies)
    assert not is_same(run("hasty", LateLane(hasty=True)), run("plain again", None))
