"""Tables of more than 2³¹ rows, or 2³⁰ weights: every row is read, updated and served in its own place.

Their memory is a file with holes. What is never written takes no space in it, and the file itself tells which rows
were: an index that wrapped around at 2³¹ or 2³² would have written another one.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import KeyedJaggedTensor

from sluice.dlrm.optim.torch_tables import needs_torch
from tests.dlrm.test_torch_tables import fbgemms, ours
from tests.product import ServedTables

ROWS, WIDTH = 2**32 - 1, 4
IDS = [0, 7, 2**31 - 1, 2**31, 2**31 + 7, ROWS - 1]


def written(path: Path, row_bytes: int) -> list[int]:
    """The rows of a file with holes in which any bit is set."""
    rows: set[int] = set()
    with open(path, "rb") as file:
        at, end = 0, os.fstat(file.fileno()).st_size
        while at < end:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # only a hole is left
                break
            stop = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            assert stop - at < 2**24, "this file system has no holes"
            file.seek(at)
            rows |= {
                (at + int(n)) // row_bytes
                for n in np.flatnonzero(np.frombuffer(file.read(stop - at), np.uint8))
            }
            at = stop
    return sorted(rows)


def made(rows, dtype, optimiser, make=ours):
    return make([(rows, WIDTH)], dtype, optimiser, [0], rate=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_exactly_the_rows_that_were_looked_up_are_read_and_updated(holes, dtype):
    """By a step that moves each weight by a quarter."""
    tables = made(ROWS, dtype, EmbOptimType.EXACT_SGD)
    assert needs_torch(tables)
    weights = tables.split_embedding_weights()[0]
    for number, row in enumerate(IDS):
        weights[row] = number + 1.0
    sums = tables(torch.tensor(IDS), torch.arange(len(IDS) + 1))
    assert sums[:, 0].tolist() == [n + 1.0 for n in range(len(IDS))]
    sums.sum().backward()
    assert [weights[row].tolist() for row in IDS] == [[n + 0.75] * WIDTH for n in range(len(IDS))]
    assert written(holes[ROWS * WIDTH], WIDTH * dtype.itemsize) == IDS


def test_an_optimisers_state_lies_in_the_rows_places(holes):
    tables = made(ROWS, torch.float16, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    sums = tables(torch.tensor(IDS), torch.arange(len(IDS) + 1))
    sums.backward(torch.arange(1.0, len(IDS) + 1).unsqueeze(1).expand(-1, WIDTH).contiguous())
    assert written(holes[ROWS], 4) == IDS
    assert tables.split_optimizer_states()[0][0].flatten()[IDS].tolist() == [
        n**2 for n in range(1, len(IDS) + 1)
    ]


@pytest.mark.parametrize(("make", "row"), [(fbgemms, 0), (ours, 2**30 // WIDTH)])
def test_fbgemm_updates_a_wrong_row_from_the_2_to_the_30th_weight_on_and_ours_does_not(
    holes, make, row
):
    """Once its part of this fails, FBGEMM can have large tables of float32 again."""
    rows = 2**30 // WIDTH + 1
    tables = made(rows, torch.float32, EmbOptimType.EXACT_ROWWISE_ADAGRAD, make)
    assert needs_torch(tables)
    tables(torch.tensor([rows - 1]), torch.arange(2)).sum().backward()
    assert written(holes[rows * WIDTH], WIDTH * 4) == [row]


@pytest.mark.usefixtures("holes")
def test_each_row_is_served_from_its_place():
    rows = torch.zeros(ROWS, WIDTH, dtype=torch.float16)
    for number, row in enumerate(IDS, 1):
        rows[row] = number
    pooled = ServedTables({"large": rows}, {"large": ["large"]})(
        KeyedJaggedTensor(
            keys=["large"], values=torch.tensor(IDS), lengths=torch.ones(len(IDS)).int()
        )
    )
    assert pooled["large"][:, 0].tolist() == list(range(1, len(IDS) + 1))
