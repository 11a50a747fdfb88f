"""Rows drawn by weight: as often as their weights say, in one order for all ranks, readers and resumptions."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.choices import Errors
from sluice.ingest.errors import LoaderError
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.parquet_files import ParquetFiles
from sluice.ingest.read.reader import SourceError
from sluice.ingest.row_order import PlanError, RowsPlan, drawn_rows, evenly
from tests.open_loader import open_loader
from tests.raises import raises

ROWS, GROUP = 3000, 120
WEIGHTS = np.where(
    np.arange(ROWS) % 50 == 7, 9.0, np.where(np.arange(ROWS) // GROUP % 5 == 2, 0.0, 1.0)
)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """Two files; a fiftieth of the rows weighs nine times the others, and of each fifth row group the rest nothing."""
    folder = tmp_path_factory.mktemp("clicks")
    for part in range(2):
        rows = np.arange(part * ROWS // 2, (part + 1) * ROWS // 2)
        pq.write_table(
            pa.table({"label": rows % 2, "row": rows, "chance": WEIGHTS[rows]}),
            folder / f"part-{part}.parquet",
            row_group_size=GROUP if part else GROUP // 2,
        )
    return ParquetFiles.open(folder, {"label": "label", "sparse": "row"})


def rows_of(source, epochs=1, **options):
    """The rows that came in each epoch, batch by batch, and the order hashes."""
    with open_loader(
        source, sample="chance", epochs=epochs, **{"batch_size": 120} | options
    ) as loader:
        found = []
        for _ in range(epochs):
            batches = [b.values.numpy().copy() for b in loader]
            found.append((batches, loader.order_hash))
        return found


@pytest.mark.parametrize("seed", range(20))
def test_each_item_comes_as_often_as_its_rounded_share(seed):
    random = np.random.default_rng(seed)
    weights = random.choice([0.0, 0.5, 1.0, 7.25], 40) * random.integers(0, 2, 40)
    weights[random.integers(40)] = 3.0
    count = int(random.integers(1, 300))
    drawn = Counter(evenly(np.cumsum(weights), count, int(random.integers(1, 2**63))).tolist())
    assert drawn.total() == count
    for item, share in enumerate(count * weights / weights.sum()):
        assert math.floor(share - 1e-9) <= drawn[item] <= math.ceil(share + 1e-9)


def test_draws_are_the_same_for_ever_and_differ_from_each_other():
    weights = np.array([1.0, 0.0, 3.0, 0.5, 0.0])
    assert drawn_rows(weights, 2**63).tolist() == [0, 2, 2, 2, 3]
    how = {"groups": ((40, 30), (30,)), "batch_size": 20, "streams": 2, "seed": 5}
    plan = RowsPlan(**how, chances=((400.0, 0.0), (300.0,)))
    slices = [one for window in plan.windows(1, (0, 1)) for one in window.slices]
    assert plan.digest != RowsPlan(**how).digest
    assert sum(one.stop - one.start for one in slices) == plan.used == 100
    assert len({one.draw for one in slices}) > 2, "a row group that comes again has other rows"
    assert {(one.file, one.group) for one in slices} == {(0, 0), (1, 0)}
    assert slices == [one for window in plan.windows(1, (0, 1)) for one in window.slices]


def test_a_row_comes_in_proportion_to_its_weight(clicks):
    epochs = 30
    counts = np.zeros(ROWS)
    for batches, _ in rows_of(clicks, epochs, knobs=Knobs(workers={"decode": 2})):
        assert sum(map(len, batches)) == ROWS, "an epoch is as long as ever"
        counts += np.bincount(np.concatenate(batches), minlength=ROWS)
    assert not counts[WEIGHTS == 0].any()
    expected = epochs * ROWS * WEIGHTS / WEIGHTS.sum()
    for weight in (1.0, 9.0):
        found = counts[weight == WEIGHTS]
        assert found.mean() == pytest.approx(expected[weight == WEIGHTS].mean(), rel=0.03)
        assert found.min() > 0
    assert counts[WEIGHTS == 9].mean() / counts[WEIGHTS == 1].mean() == pytest.approx(9, rel=0.05)


def test_the_order_is_the_same_for_all_readers_knobs_and_ranks(clicks):
    (batches, order), (others, _) = rows_of(clicks, 2)
    assert [b.tolist() for b in batches] != [b.tolist() for b in others], "each epoch draws anew"
    for options in ({"reader": "arrow"}, {"knobs": Knobs(workers={"decode": 5, "shuffle": 3})}):
        assert rows_of(clicks, **options)[0][1] == order
    assert rows_of(clicks, seed=1)[0][1] != order
    ranks = [rows_of(clicks, rank=rank, ranks=4)[0][0] for rank in range(4)]
    assert [np.concatenate(parts).tolist() for parts in zip(*ranks, strict=True)] == [
        b.tolist() for b in batches
    ]


def test_a_run_goes_on_with_the_row_that_comes_next(clicks):
    [(batches, order)] = rows_of(clicks)
    with open_loader(clicks, batch_size=120, sample="chance") as loader:
        coming = iter(loader)
        for _ in range(7):
            next(coming)
        state = json.loads(json.dumps(loader.state_dict()))
    with open_loader(
        clicks, batch_size=120, knobs=Knobs(workers={"decode": 3}), sample="chance"
    ) as loader:
        loader.load_state_dict(state)
        assert [b.values.tolist() for b in loader] == [b.tolist() for b in batches[7:]]
        assert loader.order_hash == order
    with (
        BatchLoader(clicks, batch_size=120) as loader,
        raises(PlanError, "another order", "weights"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        ({"sample": "chances"}, SourceError, ("part-0.parquet", "'chances'", "'chance'")),
        ({"shuffle": False}, PlanError, ("sampled", "shuffle")),
        (
            {"errors": Errors(on_error="quarantine")},
            LoaderError,
            ("sample='chance'", "on_error='quarantine'"),
        ),
        ({"sample": "minus"}, SourceError, ("row group 0", "'minus'", "negative")),
        ({"sample": "empty"}, SourceError, ("row group 0", "'empty'", "empty")),
        ({"sample": "text"}, SourceError, ("part-0.parquet", "'text'", "string")),
        ({"sample": "zero"}, PlanError, ("weights", "all 0")),
    ],
)
def test_what_rows_cannot_be_drawn_by_is_named(tmp_path, options, error, facts):
    rows = np.arange(240)
    columns = {
        "label": rows % 2,
        "row": rows,
        "chance": np.ones(240),
        "minus": -1.0 + rows,
        "empty": pa.array([None] + [1.0] * 239),
        "text": ["x"] * 240,
        "zero": np.zeros(240),
    }
    pq.write_table(pa.table(columns), tmp_path / "part-0.parquet")
    options = {
        "sample": "chance",
        "batch_size": 120,
        "roles": {"label": "label", "sparse": "row"},
    } | options
    with raises(error, *facts):
        open_loader(tmp_path, **options)
