"""How much of the host's memory a checkpoint takes, with a device that counts it and copies as late as it may."""

from dataclasses import replace

import pytest
import torch

from tests.dlrm.rig import META, Alone
from tests.dlrm.test_checkpoint import PART, parts_of
from tests.product import CheckpointDisk, CheckpointError, Checkpoints, SaveMemory, latest
from tests.raises import raises

MIB = 2**20
VIEWS = {"detach", "view", "split", "contiguous", "__getitem__"}
ON_THE_DEVICE = {"aminmax"}
"""Computed there. It returns two numbers."""
SIZES = {"dim", "size", "numel", "__len__", "is_floating_point", "is_contiguous"}


class DeviceTensor(torch.Tensor):
    """A tensor of a device. Only its lane may bring its numbers to the host."""

    @classmethod
    def __torch_function__(cls, func, _types, args=(), kwargs=None):
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if name in VIEWS:
            wrap = [part.as_subclass(DeviceTensor) for part in result] if name == "split" else None
            return wrap or result.as_subclass(DeviceTensor)
        assert name in ON_THE_DEVICE | SIZES or name == "__get__", f"{name} of a device's tensor"
        return result


class CountingLane:
    """Counts the buffers. A copy takes place when it is waited for. With `hasty`, it takes place with the next one."""

    def __init__(self, *, hasty: bool = False) -> None:
        self.hasty = hasty
        self.held = 0
        self.pieces: list[int] = []

    def is_there(self, tensor) -> bool:
        return isinstance(tensor, DeviceTensor)

    def buffer(self, size: int) -> torch.Tensor:
        self.held += size
        return torch.zeros(size, dtype=torch.uint8)

    def fetch(self, source, buffer):
        self.pieces.append(len(buffer))
        plain = source.as_subclass(torch.Tensor)
        return (lambda: None) if self.hasty else lambda: buffer.copy_(plain)


class Disk(CheckpointDisk):
    """Notes the largest part."""

    largest = 0

    def write(self, path, parts):
        def watched():
            for part in parts:
                self.largest = max(self.largest, len(part))
                yield part

        super().write(path, watched())


def saved_by(folder, lane, free: int, *, on_device: bool = True, disk=None):
    """Saves tensors of 9 MiB and changes them at once. Returns the bytes of the file."""
    torch.manual_seed(1)
    tensors = {
        "table": torch.rand(2 * MIB),
        "half": torch.rand(MIB // 2 + 1).bfloat16(),
        "step": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
        "turned": torch.rand(3, 5).T,
    }
    if on_device:
        tensors = {name: value.as_subclass(DeviceTensor) for name, value in tensors.items()}
    checkpoints = Checkpoints(
        folder,
        parts_of(lambda: dict(tensors)),
        Alone(),
        keep=2,
        files=disk or Disk(),
        lane=lane,
        memory_free=lambda: free,
    )
    try:
        checkpoints.save(replace(META, step=1))
        for value in tensors.values():
            value.as_subclass(torch.Tensor).zero_()
        checkpoints.wait()
    finally:
        checkpoints.close()
    return (latest(folder)[0] / PART).read_bytes()


@pytest.fixture
def expected(tmp_path):
    """The bytes that a CPU with much memory writes."""
    return saved_by(tmp_path / "expected", None, 2**40, on_device=False)


@pytest.mark.parametrize(
    ("free", "piece"), [(2**40, 64 * MIB), (12 * MIB, 4 * MIB), (3 * MIB, MIB), (2 * MIB, MIB)]
)
def test_the_bytes_are_the_same_and_the_host_holds_two_pieces(tmp_path, expected, free, piece):
    lane, disk = CountingLane(), Disk()
    assert saved_by(tmp_path / "device", lane, free, disk=disk) == expected
    assert lane.held == 2 * piece
    assert max(lane.pieces) <= piece
    assert disk.largest <= piece


@pytest.mark.parametrize("free", [12 * MIB, 2 * MIB])
def test_a_cpu_without_room_for_a_copy_writes_the_same_bytes(tmp_path, expected, free):
    disk = Disk()
    assert saved_by(tmp_path / "cpu", None, free, on_device=False, disk=disk) == expected
    assert disk.largest <= free // 2


def test_the_device_finds_a_piece_that_is_used_before_it_arrived(tmp_path, expected):
    assert saved_by(tmp_path / "hasty", CountingLane(hasty=True), 3 * MIB) != expected


def test_a_host_without_room_for_the_least_pieces_is_refused_before_anything_is_written(tmp_path):
    with raises(CheckpointError, "2 MiB", "its 1 rank,", "1 MiB", "--memory-limit"):
        saved_by(tmp_path / "full", CountingLane(), MIB)
    assert not (tmp_path / "full").exists()


class TwoHosts(Alone):
    """The other host has nothing left."""

    ranks = 2

    def gather_objects(self, value, _group=None):
        (own,) = super().gather_objects(value)
        other = [1, 0, 5] if isinstance(own, list) and len(own) == 3 else own
        return [own, other]


def test_every_rank_knows_of_a_host_without_room(tmp_path):
    checkpoints = Checkpoints(
        tmp_path, parts_of(dict), TwoHosts(), keep=1, memory_free=lambda: 2**30
    )
    with raises(CheckpointError, "0 B are free"):
        checkpoints.save(META)
    checkpoints.close()


@pytest.mark.parametrize(
    ("ranks", "state", "free", "copies", "piece"),
    [
        (
            8,
            640 * 2**30,
            500 * 2**30,
            False,
            64 * MIB,
        ),  # eight full devices of 80 GiB in the documented pod
        (8, 240 * 2**30, 500 * 2**30, True, 64 * MIB),
        (8, 640 * 2**30, 256 * MIB, False, 16 * MIB),
        (1, 0, 2 * MIB, True, MIB),
    ],
)
def test_a_copy_takes_at_most_half_of_what_is_free(ranks, state, free, copies, piece):
    memory = SaveMemory(ranks=ranks, state_bytes=state, free_bytes=free)
    assert (memory.copies, memory.piece_bytes) == (copies, piece)
    assert ("training stops" in memory.text) == (not copies)
