"""The loader against its slow twin, and what it promises to a training loop."""

from __future__ import annotations

import pytest

from ingest.loader import Loader
from tests.ingest import twin


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
@pytest.mark.parametrize(("last", "shuffle", "ranks", "batch_size", "window_rows"), [
    ("drop", True, 1, 96, None), ("pad", True, 2, 64, 300), ("pad", False, 4, 1000, 100), ("drop", True, 1, 8, 256),
    ("pad", True, 1, 8000, 50)])
def test_every_row_comes_as_the_twin_says(table, reader, last, shuffle, ranks, batch_size, window_rows):  # noqa: PLR0917
    files = twin.Table(table.files_of("train"))
    for rank in range(ranks):
        with Loader(table, batch_size=batch_size, reader=reader, last=last, shuffle=shuffle, rank=rank, ranks=ranks,
                    window_rows=window_rows, epochs=2, seed=3) as loader:
            for epoch in range(2):
                expected = twin.batches(loader.plan, epoch, rank, ranks)
                got = 0
                for batch, rows in zip(loader, expected, strict=True):
                    assert (batch.epoch, batch.step) == (epoch, got)
                    twin.expect(loader, files, batch, rows)
                    got += 1
                assert got == len(loader)
