"""Memory that is used again: ours, and what Arrow's allocator holds back from the system."""

import ctypes
import gc
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.product import Buffers
from tests.run_program import run_program

_ARROW = """
import sluice
import pyarrow as pa

def own():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon:")) // 1024

pool, before = pa.default_memory_pool(), own()
buffer = pa.allocate_buffer(64 * 2**20, memory_pool=pool)
memoryview(buffer).cast("B")[::4096] = bytes(64 * 2**8)
used = own()
del buffer
held = own()
pool.release_unused()
print(pool.backend_name, used - before, held - before, own() - before)
"""


_VIEWS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "slice": lambda array: array[1:],
    "other type": lambda array: array.view(np.uint32),
    "torch": lambda array: torch.from_numpy(array)[1:].numpy(),
    "torch over DLPack": lambda array: torch.from_dlpack(array).view(torch.int32).numpy(),
    "memoryview": lambda array: np.asarray(memoryview(array)),
    "Arrow": lambda array: (
        pa.Array.from_buffers(pa.int32(), array.size, [None, pa.py_buffer(array)])
        .slice(1)
        .to_numpy()
    ),
}
"""Ways to an array in the same memory, from a line of int32."""

_HOLDERS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "a slice": lambda array: array[1:],
    "a slice of a slice": lambda array: array[1:][1:],
    "a tensor": torch.from_numpy,
    "a view of a tensor": lambda array: torch.from_numpy(array)[1:].view(torch.float32),
    "a tensor's memory": lambda array: torch.from_numpy(array).untyped_storage(),
    "a tensor over DLPack": torch.from_dlpack,
    "a capsule of DLPack": lambda array: array.__dlpack__(),
    "a capsule of DLPack, of a tensor": lambda array: torch.from_numpy(array).__dlpack__(),
    "a memoryview": lambda array: memoryview(array[1:]),
    "an Arrow buffer": pa.py_buffer,
    "an Arrow array": lambda array: pa.array(array).slice(1),
    "the end of the chain of bases": lambda array: array.base,
    "ctypes": lambda array: (ctypes.c_int32 * len(array)).from_buffer(array),
    "an iterator": lambda array: array.flat,
    "a function": lambda array: lambda: array,
    "a cycle": lambda array: (cycle := [array]).append(cycle) or cycle,
}


@pytest.mark.parametrize("holder", _HOLDERS)
def test_an_array_comes_again_once_nothing_refers_to_it(holder):
    buffers = Buffers()
    first = buffers.take((6,), np.int32)
    address, held = first.ctypes.data, _HOLDERS[holder](first)
    del first
    assert buffers.idle_bytes() == 0
    buffers.trim()
    assert buffers.take((6,), np.int32).ctypes.data != address
    del held
    if holder == "a cycle":
        gc.collect()
    assert buffers.idle_bytes() == 2 * 24
    assert buffers.take((6,), np.float32).dtype == np.float32
    assert buffers.take((3, 2), np.int32).shape == (3, 2)
    assert buffers.take((6,), np.int32).ctypes.data == address
    buffers.trim()
    assert buffers.idle_bytes() == 0


@pytest.mark.parametrize("seed", range(40))
def test_drawn_chains_of_views_keep_their_values_until_the_last_is_dropped(seed):
    draw = random.Random(seed)
    buffers = Buffers()
    held: list[tuple[Any, Any, int]] = []
    for number in range(60):
        array = buffers.take((32,), np.int32)
        address = array.ctypes.data
        assert not any(address == other for *_, other in held)
        array[:] = number
        for _ in range(draw.randrange(5)):
            line = np.ascontiguousarray(array.view(np.int32).reshape(-1))
            if not line.flags.writeable:  # torch warns of these
                break
            view = _VIEWS[draw.choice([*_VIEWS])](line)
            array = view if view.size >= 4 and np.shares_memory(view, array) else array
        held.append((array, array.copy(), address))
        del array
        if draw.random() < 0.5:
            del held[draw.randrange(len(held))]
        assert all((array == value).all() for array, value, _ in held)
    view = line = None
    held.clear()
    buffers.trim()
    assert buffers.idle_bytes() == 0
    assert not buffers._memory


def test_a_line_fits_other_sizes_later():
    buffers = Buffers()
    address = buffers.take_line(1000, np.int32).ctypes.data
    line = buffers.take_line(1010, np.int32)
    assert (len(line), line.ctypes.data) == (1010, address)


def test_arrow_holds_freed_memory_a_while_and_returns_it_when_asked():
    environment = {
        name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"
    }
    result = run_program("-c", _ARROW, check=True, env={**environment, "MIMALLOC_VERBOSE": "1"})
    assert "option 'purge_delay': 1000" in result.stderr
    backend, used, held, left = result.stdout.split()
    assert backend == "mimalloc"
    assert min(int(used), int(held)) > 60
    assert int(left) < 8
