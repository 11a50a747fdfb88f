"""Tables of more than 2³¹ rows, or 2³⁰ weights: every row is read, updated, kept and served in its own place.

Their memory is a file with holes. What is never written takes no space in it, and the file itself tells which rows
were: an index that wrapped around at 2³¹ or 2³² would have written another one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from sluice.dlrm.checkpoint.layout import FORMAT
from sluice.dlrm.checkpoint.meta import LAYOUT
from sluice.dlrm.checkpoint.partial_read import CheckpointReader, TensorBox
from sluice.dlrm.optim.torch_tables import TorchTables, needs_torch

ROWS, WIDTH = 2**32 - 1, 4
IDS = [0, 7, 2**31 - 1, 2**31, 2**31 + 7, ROWS - 1]


def written(path: Path, row_bytes: int) -> list[int]:
    """The rows of a file with holes in which any bit is set."""
    found: set[int] = set()
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
            found |= {
                (at + int(n)) // row_bytes
                for n in np.flatnonzero(np.frombuffer(file.read(stop - at), np.uint8))
            }
            at = stop
    return sorted(found)


def made(rows, kind, optimiser, *, own=True, count=1):
    found = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)] * count,
        weights_precision=kind,
        optimizer=optimiser,
        learning_rate=0.25,
        eps=1e-8,
        table_names=[f"t{n}" for n in range(count)],
    )
    if own:
        found.__class__ = TorchTables
        found.start(0, [0], [0])
    return found


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, SparseType.FP32), (torch.float16, SparseType.FP16)], ids=str
)
def test_exactly_the_rows_that_were_looked_up_are_read_and_updated(holes, dtype, kind):
    """By a step that moves each weight by a quarter."""
    tables = made(ROWS, kind, EmbOptimType.EXACT_SGD)
    assert needs_torch(tables)
    weights = tables.split_embedding_weights()[0]
    for number, row in enumerate(IDS):
        weights[row] = number + 1.0
    found = tables(torch.tensor(IDS), torch.arange(len(IDS) + 1))
    assert found[:, 0].tolist() == [n + 1.0 for n in range(len(IDS))]
    found.sum().backward()
    assert [weights[row].tolist() for row in IDS] == [[n + 0.75] * WIDTH for n in range(len(IDS))]
    assert written(holes[ROWS * WIDTH], WIDTH * dtype.itemsize) == IDS


def test_an_optimisers_state_lies_in_the_rows_places(holes):
    tables = made(ROWS, SparseType.FP16, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    found = tables(torch.tensor(IDS), torch.arange(len(IDS) + 1))
    found.backward(torch.arange(1.0, len(IDS) + 1).unsqueeze(1).expand(-1, WIDTH).contiguous())
    assert written(holes[ROWS], 4) == IDS
    assert tables.split_optimizer_states()[0][0].flatten()[IDS].tolist() == [
        n**2 for n in range(1, len(IDS) + 1)
    ]


@pytest.mark.parametrize("own", [False, True])
def test_fbgemm_updates_a_wrong_row_from_the_2_to_the_30th_weight_on_and_ours_does_not(holes, own):
    """Once its part of this fails, FBGEMM can have large tables of float32 again."""
    rows = 2**30 // WIDTH + 1
    tables = made(rows, SparseType.FP32, EmbOptimType.EXACT_ROWWISE_ADAGRAD, own=own)
    assert needs_torch(tables)
    tables(torch.tensor([rows - 1]), torch.arange(2)).sum().backward()
    assert written(holes[rows * WIDTH], WIDTH * 4) == [rows - 1 if own else 0]


def test_fbgemm_updates_the_right_rows_of_many_tables_that_are_large_only_together(holes):
    rows, count = 2**28 // WIDTH, 18
    tables = made(rows, SparseType.FP32, EmbOptimType.EXACT_ROWWISE_ADAGRAD, own=False, count=count)
    assert not needs_torch(tables)
    last = [rows - 1 - number for number in range(count)]
    tables(torch.tensor(last), torch.arange(count + 1)).sum().backward()
    assert written(holes[rows * WIDTH * count], WIDTH * 4) == [
        n * rows + row for n, row in enumerate(last)
    ]


@pytest.mark.parametrize(
    "optimiser",
    [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_SGD],
    ids=lambda o: o.value,
)
def test_ours_trains_float32_as_fbgemm_does(optimiser):
    generator = torch.Generator().manual_seed(1)
    theirs, ours = (made(50, SparseType.FP32, optimiser, own=own) for own in (False, True))
    assert not needs_torch(theirs)
    first = torch.randn(50, WIDTH, generator=generator)
    for tables in (theirs, ours):
        tables.split_embedding_weights()[0].copy_(first)
    for _ in range(5):
        ids, ends = torch.randint(0, 50, (60,), generator=generator), torch.arange(0, 61, 3)
        direction = torch.randn(20, WIDTH, generator=generator)
        found = [tables(ids, ends) for tables in (theirs, ours)]
        torch.testing.assert_close(found[1], found[0])
        for one in found:
            one.backward(direction)
    torch.testing.assert_close(
        ours.split_embedding_weights()[0], theirs.split_embedding_weights()[0]
    )


def test_a_checkpoints_rows_are_read_from_their_places(tmp_path):
    """As two ranks wrote it, each half of the rows; a box across the seam, and rows one by one."""
    key, half = "model.tables.embedding_bags.t.weight", ROWS // 2
    parts, chunks = [(0, half), (half, ROWS - half)], []
    values = {row: n + 1.0 for n, row in enumerate(sorted({*IDS, half - 1, half}))}
    for rank, (first, rows) in enumerate(parts):
        name = f"rank-{rank:05d}.safetensors"
        header = json.dumps(
            {"0": {"dtype": "F16", "shape": [rows, WIDTH], "data_offsets": [0, rows * WIDTH * 2]}}
        ).encode()
        header += b" " * (-len(header) % 8)
        with open(tmp_path / name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            begin = file.tell()
            file.truncate(begin + rows * WIDTH * 2)
            for row in (row for row in values if first <= row < first + rows):
                file.seek(begin + (row - first) * WIDTH * 2)
                file.write(np.full(WIDTH, values[row], np.float16).tobytes())
        chunks.append([[first, 0], [rows, WIDTH], name, "0"])
    (tmp_path / LAYOUT).write_text(
        json.dumps(
            {
                "format": FORMAT,
                "tensors": {key: {"dtype": "F16", "size": [ROWS, WIDTH], "chunks": chunks}},
                "values": {},
            }
        )
    )
    reader = CheckpointReader(tmp_path)
    boxes = [TensorBox(key, torch.empty(1, WIDTH, dtype=torch.float16), (row, 0)) for row in values]
    seam = TensorBox(key, torch.empty(4, WIDTH, dtype=torch.float16), (half - 2, 0))
    reader.read([*boxes, seam])
    assert [float(box.into[0, -1]) for box in boxes] == list(values.values())
    assert seam.into[:, 0].tolist() == [0, values[half - 1], values[half], values.get(half + 1, 0)]
    assert reader.rows("t") == ROWS
