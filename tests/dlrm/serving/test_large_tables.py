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
    tables = NarrowTables([Table(name="large", rows=ROWS, width=WIDTH)], {"large": ["large"]}, kind)
    for number, row in enumerate(IDS, 1):
        tables._weights["large"][row] = number if kind == "fp16" else 127
        tables._scales["large"][row : row + 1] = number / 127  # fp16 has none
    pooled = tables(
        KeyedJaggedTensor(
            keys=["large"], values=torch.tensor(IDS), lengths=torch.ones(len(IDS)).int()
        )
    )
    torch.testing.assert_close(
        pooled["large"][:, 0], torch.arange(1.0, len(IDS) + 1), rtol=2e-3, atol=0
    )
