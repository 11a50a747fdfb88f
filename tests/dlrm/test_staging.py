"""Training whose batches go through pinned buffers to a device that copies late."""

import pytest
import torch

from sluice.dlrm.evaluation import split
from sluice.dlrm.session import trainer
from sluice.dlrm.training import overlapped_steps
from tests.dlrm.ranks import trained, whole_weights
from tests.late_device import LateLane
from tests.product import PinnedStaging, world

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Losses and weights of a short training with evaluations; `lane` is the way of `module` to the device."""

    def train(name: str, lane: LateLane | None, module=overlapped_steps, *, ahead: bool = True):
        staging = None if lane is None else PinnedStaging(lane)
        monkeypatch.setattr(module, "staging_for", lambda _: staging)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        with world() as here:
            losses, parts, _ = trained(here, "auto", tmp_path / name, ahead=ahead, evals=3)
            return losses, whole_weights(parts.model, here)

    return train


def is_same(batch, other) -> bool:
    return batch[0] == other[0] and all(torch.equal(batch[1][k], other[1][k]) for k in batch[1])


@pytest.mark.parametrize(
    ("module", "ahead"), [(overlapped_steps, True), (trainer, False), (split, True)]
)
def test_what_comes_from_buffers_that_are_used_again_is_the_same_to_the_last_digit(
    run, module, ahead
):
    """Steps that look ahead, steps that do not, and evaluations."""
    lane = LateLane()
    plain = run("plain", None, module, ahead=ahead)
    assert is_same(run("late", lane, module, ahead=ahead), plain)
    assert 0 < lane.made <= len(lane.copies) - 5 * (module is not split)


def test_the_late_device_finds_a_buffer_of_training_that_is_used_too_early(run):
    assert not is_same(run("hasty", LateLane(hasty=True)), run("plain", None))
