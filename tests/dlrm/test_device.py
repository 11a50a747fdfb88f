"""Pinned staging: on a device that copies as late as it may, and on a GPU where there is one."""

import random
from collections import deque

import pytest
import torch

from sluice.dlrm.staging import PinnedStaging, staging_for
from tests.late_device import LateLane, LateTensor

KINDS = (torch.float32, torch.int32, torch.int64)


def drawn(random_: random.Random) -> list[torch.Tensor]:
    """Tensors of one batch: one of them lies column by column, one may be empty."""
    rows = random_.randint(2, 90)
    return [
        torch.rand(3, rows).T,
        *(torch.randint(0, 99, (random_.choice((0, rows, 2 * rows)),)).to(kind) for kind in KINDS),
    ]


def sent_and_looked_at(staging: PinnedStaging, seed: int, *, steps: int = 60) -> list[bool]:
    """Sends batches of changing sizes from memory that is used again at once. Looks at each batch after up to three
    more were sent; whether it was what was sent."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    under_way, same = deque(), []
    for _ in range(steps):
        batch = drawn(random_)
        expected = [tensor.clone() for tensor in batch]
        under_way.append((staging.send(batch), expected))
        for tensor in batch:
            tensor.zero_()
        while len(under_way) > random_.randint(0, 3):
            now, then = under_way.popleft()
            assert [t.stride() for t in now] == [t.stride() for t in then]
            same.append(all(torch.equal(a.cpu(), b) for a, b in zip(now, then, strict=True)))
    return same


@pytest.mark.parametrize("seed", range(5))
def test_a_buffer_is_used_again_only_when_the_device_has_taken_its_tensor(seed):
    lane = LateLane()
    assert all(sent_and_looked_at(PinnedStaging(lane), seed))
    assert lane.made < len(lane.copies) / 3, "buffers are used again"


def test_there_are_as_many_buffers_as_copies_on_their_way_and_few_sizes():
    lane = LateLane()
    staging = PinnedStaging(lane)
    for size in range(1, 1025):
        (sent,) = staging.send([torch.zeros(size)])
        assert isinstance(sent, LateTensor)
        sent.sum()
    assert lane.made == 11  # 1, 2, 4, … 1,024 numbers


def test_a_cpu_takes_tensors_as_they_are():
    assert staging_for(torch.device("cpu")) is None


def test_a_gpu_takes_them_by_way_of_pinned_buffers(monkeypatch):
    monkeypatch.setattr("sluice.dlrm.staging.CudaLane", lambda _: LateLane())
    assert isinstance(staging_for(torch.device("cuda", 0)), PinnedStaging)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("seed", range(5))
def test_tensors_arrive_on_a_gpu_as_they_are(seed):
    """In a stream of their own, as TorchRec copies."""
    with torch.cuda.stream(torch.cuda.Stream()):
        staging = staging_for(torch.device("cuda", 0))
        assert staging is not None
        assert staging.send([torch.zeros(3)])[0].is_cuda
        assert all(sent_and_looked_at(staging, seed, steps=300))
