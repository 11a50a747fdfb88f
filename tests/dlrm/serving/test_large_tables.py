"""Tables of more than 2³¹ rows, as they are served."""

from __future__ import annotations

import pytest
import torch
from torchrec import KeyedJaggedTensor

from sluice.dlrm.options import Table
from sluice.dlrm.serving.int8_tables import NarrowTables

ROWS, WIDTH = 2**32 - 1, 4
IDS = [0, 7, 2**31 - 1, 2**31, 2**31 + 7, ROWS - 1]


@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.usefixtures("holes")
def test_each_row_is_read_from_its_place(kind):
    """Behind another table, so that numbers of rows are beyond 2³² in the array that both share."""
    first = Table(name="small", rows=10, width=WIDTH)
    tables = NarrowTables(
        [first, Table(name="large", rows=ROWS, width=WIDTH)],
        {"small": ["small"], "large": ["large"]},
        kind,
    )
    for number, row in enumerate(IDS, 1):
        place = first.rows + row
        tables._weights[WIDTH][place] = number if kind == "fp16" else 127
        tables._scales[WIDTH][place : place + 1] = number / 127  # fp16 has none
    ids = torch.tensor([*([3] * len(IDS)), *IDS])
    pooled = tables(
        KeyedJaggedTensor(
            keys=["small", "large"], values=ids, lengths=torch.ones(2 * len(IDS)).int()
        )
    )
    torch.testing.assert_close(
        pooled["large"][:, 0], torch.arange(1.0, len(IDS) + 1), rtol=2e-3, atol=0
    )
    assert not pooled["small"].any()
