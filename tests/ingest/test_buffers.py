"""Memory that is used again: ours, and what Arrow's allocator holds back from the system."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from sluice.ingest.memory.buffers import Buffers
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


@pytest.mark.parametrize("still_used_by", [lambda array: array[1:], torch.from_numpy, memoryview])
def test_an_array_comes_again_once_nothing_refers_to_it(still_used_by):
    buffers = Buffers()
    first = buffers.take((2, 3), np.int32)
    address, user = first.ctypes.data, still_used_by(first)
    del first
    assert buffers.idle_bytes() == 0
    assert buffers.take((2, 3), np.int32).ctypes.data != address
    del user
    assert buffers.idle_bytes() == 2 * 24
    assert buffers.take((2, 3), np.float32).dtype == np.float32
    assert buffers.take((3, 2), np.int32).shape == (3, 2)
    assert buffers.take((2, 3), np.int32).ctypes.data == address
    buffers.trim()
    assert buffers.idle_bytes() == 0


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
