"""Which numbers of ranks share the batches, and that they get the same global batches: also more ranks than streams."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from tests.etl.tables import write_rows
from tests.open_loader import open_loader
from tests.product import RowsPlan

ROLES = "label=label;dense=x;sparse=a;id_list=b"


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """1,000 rows with a number, an id and a bag of none to four ids."""
    path, random = tmp_path_factory.mktemp("clicks") / "part.parquet", np.random.default_rng(3)
    rows = 1000
    bags = [random.integers(0, 9, n).tolist() for n in random.integers(0, 5, rows)]
    write_rows(
        path,
        row_group_size=150,
        label=np.zeros(rows, np.float32),
        x=np.arange(rows, dtype=np.float32),
        a=np.arange(rows, dtype=np.int32),
        b=pa.array(bags, pa.list_(pa.int32())),
    )
    return path


def _rows(batch):
    """Each row of a batch: number, id, bag and weight."""
    ids, bags = batch.as_dict()["a"], batch.as_dict()["b"]
    parts = np.split(bags.values.numpy(), np.cumsum(bags.lengths.numpy())[:-1])
    return [
        (float(x), int(a), tuple(map(int, bag)), float(weight))
        for x, a, bag, weight in zip(batch.dense[:, 0], ids, parts, batch.weight, strict=True)
    ]


def _epoch(clicks, batch_size, ranks, state=None, **options):
    """The global batches that so many ranks make together, and the state of each rank's loader after three."""
    parts, states = [], []
    for rank in range(ranks):
        with open_loader(
            str(clicks),
            batch_size=batch_size,
            roles=ROLES,
            rank=rank,
            ranks=ranks,
            reader="arrow",
            window_rows=100,
            **options,
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = []
            for batch in loader:
                batches.append(_rows(batch))
                assert batch.rows == sum(weight > 0 for *_, weight in batches[-1])
                if len(batches) == 3:
                    states.append(loader.state_dict())
            parts.append(batches)
    return [list(itertools.chain(*step)) for step in zip(*parts, strict=True)], states


@pytest.mark.parametrize("last", ["drop", "pad"])
@pytest.mark.parametrize(("batch_size", "ranks"), [(64, 16), (72, 24), (10, 10)])
def test_more_ranks_than_streams_make_the_same_global_batches(clicks, batch_size, ranks, last):
    whole, _ = _epoch(clicks, batch_size, 1, last=last)
    parts, states = _epoch(clicks, batch_size, ranks, last=last)
    assert parts == whole
    assert all(state == {**states[0], "order": state["order"]} for state in states), (
        "positions are of the global order"
    )


def test_a_run_goes_on_at_the_same_row_on_more_ranks_than_streams_and_back(clicks):
    whole, (state,) = _epoch(clicks, 64, 1)
    assert _epoch(clicks, 64, 32, state=state)[0] == whole[3:]
    (state, *_), (_, *others) = _epoch(clicks, 64, 32)[1], whole
    assert _epoch(clicks, 64, 1, state=state)[0] == others[2:]


@pytest.mark.parametrize(
    ("batch_size", "streams"), [(1, 1), (10, 2), (100, 4), (1000, 8), (8192, 8)]
)
def test_streams_follow_the_batch_size_and_every_power_of_two_of_a_usual_batch_fits(
    clicks, batch_size, streams
):
    with open_loader(str(clicks), batch_size=batch_size, roles=ROLES, last="pad") as loader:
        assert loader.plan.streams == streams
    plan = RowsPlan(groups=((8192,) * 4,), batch_size=batch_size, streams=streams)
    fits = {ranks for ranks in range(1, 65) if plan.can_share(ranks)}
    assert {ranks for ranks in range(1, streams + 1) if streams % ranks == 0} <= fits
    assert batch_size < 8192 or fits == {2**power for power in range(7)}
    for ranks in fits:
        assert sum(plan.share_of(rank, ranks).rows for rank in range(ranks)) == batch_size
