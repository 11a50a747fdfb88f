"""The ETL counts lookups per row; models and placements use these counts."""

import pyarrow as pa
import pytest
import torch

from sluice.dlrm.lookup_frequencies import runs, share
from sluice.dlrm.model.spread_rows import table_of
from sluice.dlrm.options import spread_out
from tests.product import (
    Field,
    ModelConfig,
    Profile,
    Table,
    TrainingMachine,
    place,
    spread_rows,
    tables_of,
)

ROWS, RANKS = 50_000, 4


@pytest.fixture(scope="module")
def spread_column() -> tuple[Table, torch.Tensor]:
    """A column whose first ids are the frequent ones, through the ETL's own profile; and its ids."""
    ids = (
        ROWS ** torch.rand(40_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ).int()
    fields = (Field(name="C", role="sparse", type="int32", cardinality=ROWS),)
    profile = Profile.of(pa.table({"C": pa.array(ids.numpy(), pa.int32())}), fields, {}).columns
    every = (
        *fields,
        Field(name="I", role="dense", type="float"),
        Field(name="y", role="label", type="int8"),
    )
    return tables_of(every, ModelConfig(), profile)[0], ids


@pytest.mark.parametrize(
    ("rows", "octave"), [(64, (32, 64)), (40, (32, 40)), (33, (32, 33)), (20, (19, 20))]
)
def test_an_octave_is_a_run_of_the_rows_that_the_table_has(rows, octave):
    use = runs({"bins": {"octave 5": 3, "low": 1}}, rows)
    assert use == ((0, 18, 0.25), (*octave, 0.75))
    assert share(use, rows, 0, 18) == 0.25
    assert share(use, rows, 0, rows) == 1


def test_spread_keeps_the_frequent_ids_off_the_first_rank_and_the_plan_knows(spread_column):
    table, ids = spread_column
    model = spread_out(ModelConfig(), [table])
    assert model.spread == ("C",)
    spread = table_of(table, spread=True)
    machine = TrainingMachine(ranks=RANKS, memory_bytes=10**10)
    block = -(-ROWS // RANKS)
    # One id alone has 6 % of the lookups.
    for t, rows, off in ((table, ids, 0.03), (spread, spread_rows(ids, ROWS), 0.07)):
        placement = place([t], machine, asked={"C": "row"})
        real = torch.bincount(rows // block, minlength=RANKS) / len(ids)
        told = [reads / (16 * 4) for reads in placement.loads("reads")]
        assert told == pytest.approx(real.tolist(), abs=off)
    assert place([table], machine, asked={"C": "row"}).balance[1] > 3


def test_what_is_small_or_even_is_left_alone():
    small = Table(name="C", rows=9000, width=16, use=((0, 18, 1.0),))
    even = Table(name="C", rows=ROWS, width=16, use=((0, ROWS, 1.0),))
    unknown = Table(name="C", rows=ROWS, width=16)
    for t in (small, even, unknown):
        assert spread_out(ModelConfig(), [t]).spread == ()
