"""`Ranks`: this process's place among the ranks, and the exchange of small values between them.

Values are sent as JSON, followed by the bytes of arrays and tensors. Nothing is unpickled. torchrun's environment names
the ranks. Without it there is one."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sluice.dlrm.rank_exit import LostRanks
from sluice.dlrm.sharding import machine as machines
from sluice.dlrm.step_threads import THREADS, thread_count
from sluice.ingest.machine import Machine

_ARRAY = "an array"
_START = timedelta(minutes=5)
"""How long all ranks may take to start. torch's own limit is half an hour."""


def packed(value: Any) -> bytes:
    """Encodes a value as bytes. Raises TypeError for a type that `Ranks.gather_objects` does not take."""
    tail: list[bytes] = []

    def encode(part: Any) -> dict[str, Any]:
        array = part.numpy() if isinstance(part, torch.Tensor) else part
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
            raise TypeError(f"{type(part).__name__} {part!r} cannot be sent to another rank")
        begin = sum(map(len, tail))
        tail.append(np.ascontiguousarray(array).tobytes())
        return {_ARRAY: [array.dtype.str, array.shape, begin, isinstance(part, torch.Tensor)]}

    head = json.dumps(value, default=encode).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *tail])


def unpacked(data: bytes) -> Any:
    """Decodes a value that `packed` has encoded."""
    head_end = 8 + int.from_bytes(data[:8], "little")

    def decode(part: dict[str, Any]) -> Any:
        if _ARRAY not in part:
            return part
        kind, shape, begin, tensor = part[_ARRAY]
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(data, np.dtype(kind), count, head_end + begin).reshape(shape).copy()
        return torch.from_numpy(array) if tensor else array

    return json.loads(data[8:head_end], object_hook=decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One rank's view of all ranks. The model's collectives go over `group`; small agreements over `control`, on the
    CPU."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    host: int
    """Number of this machine among those of the run."""
    device: torch.device
    group: Any
    control: Any
    saving: Any
    """A group like `control`, for the thread that writes checkpoints."""
    store: Any
    """The process group's store. Another thread must use a `clone()`."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def apart(self, name: str) -> Ranks:
        """Returns the same ranks with separate keys in the store, so that they do not read earlier values."""
        return replace(self, store=dist.PrefixStore(name, self.store))  # type: ignore[attr-defined]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks of a small CPU tensor, on every rank."""
        values = values.clone()
        dist.all_reduce(values, group=self.control)
        return values

    def gather_objects(self, value: Any, group: Any = None) -> list[Any]:
        """Gives every rank one small value of each rank, in the order of ranks. It goes over `control`, unless another
        group is named. A value is what JSON knows, numpy arrays and CPU tensors, in lists and in mappings with strings
        as keys. Tuples arrive as lists, also from the rank itself."""
        group = self.control if group is None else group
        payload = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
        longest = int(max(sizes))
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        payload = torch.nn.functional.pad(payload, (0, longest - len(payload)))
        dist.all_gather(parts, payload, group=group)
        return [
            unpacked(part[: int(size)].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def barrier(self) -> None:
        dist.barrier(group=self.control)


def machine(ranks: int, local_ranks: int) -> machines.TrainingMachine:
    """The machine that tables are placed on: each rank's GPU, or its part of this machine's memory."""
    cores, memory = (int(n) // local_ranks for n in (Machine().cores(), Machine().memory_limit()))
    if torch.cuda.is_available():
        return machines.TrainingMachine(
            ranks=ranks,
            cores=cores,
            memory_bytes=torch.cuda.get_device_properties(0).total_memory,
            host_memory_bytes=memory // 2,
        )
    # Half is kept for the loader's buffers and the dense layers, which share the memory here.
    return machines.TrainingMachine(
        ranks=ranks, cores=cores, memory_bytes=memory, reserve=0.5, device="cpu"
    )


def await_ranks(store: Any, rank: int, ranks: int, limit: timedelta = _START) -> None:
    """Waits until all ranks have started. Raises LostRanks with those that have not."""
    keys = [f"sluice/started/{number}" for number in range(ranks)]
    store.set(keys[rank], platform.node())
    try:
        store.wait(keys, limit)
    except dist.DistError as error:
        lost = [number for number, key in enumerate(keys) if not store.check([key])]
        raise LostRanks(
            f"ranks that did not start within {limit.total_seconds():.0f} s: "
            f"{', '.join(map(str, lost))} of {ranks}. Look at the hosts that should have started them"
        ) from error


@contextmanager
def world(step_rows: int = 0) -> Iterator[Ranks]:
    """Returns a context in which the process group exists. `step_rows`: the rows of a rank's step."""
    local_rank, local_ranks = (
        int(os.environ.get(n, d)) for n, d in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # before the loader or the group touch a GPU
    elif THREADS not in os.environ:
        torch.set_num_threads(thread_count(os.environ, Machine().cores(), step_rows))
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        try:
            met = dist.rendezvous("env://", timeout=_START)  # type: ignore[attr-defined]
            store, rank, ranks = next(met)
        except dist.DistError as error:
            raise LostRanks(
                f"rank {os.environ['RANK']} on {platform.node()} cannot reach the first rank's host, "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, within {_START.total_seconds():.0f} s. "
                "Look at that host and the network between them"
            ) from error
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            # torchrun keeps its store when it starts ranks anew: what those before wrote there must not be read. A
            # store of the ranks' own goes with them; there, agents need not have counted as many starts.
            number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"life {number}", store)  # type: ignore[attr-defined]
        await_ranks(store, rank, ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        yield Ranks(
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            local_rank=local_rank,
            local_ranks=local_ranks,
            host=int(os.environ.get("GROUP_RANK", "0")),
            device=device,
            group=group,
            control=dist.new_group(backend="gloo") if cuda else group,
            saving=dist.new_group(backend="gloo"),
            store=dist.distributed_c10d._get_default_store(),
        )
    finally:
        dist.destroy_process_group()
