"""Tables of more than 2³¹ rows, as they are served."""

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.product import ServedTables

ROWS, WIDTH = 2**32 - 1, 4
IDS = [0, 7, 2**31 - 1, 2**31, 2**31 + 7, ROWS - 1]


@pytest.mark.usefixtures("holes")
def test_each_row_is_read_from_its_place():
    rows = torch.zeros(ROWS, WIDTH, dtype=torch.float16)
    for number, row in enumerate(IDS, 1):
        rows[row] = number
    pooled = ServedTables({"large": rows}, {"large": ["large"]})(
        KeyedJaggedTensor(
            keys=["large"], values=torch.tensor(IDS), lengths=torch.ones(len(IDS)).int()
        )
    )
    assert pooled["large"][:, 0].tolist() == list(range(1, len(IDS) + 1))
