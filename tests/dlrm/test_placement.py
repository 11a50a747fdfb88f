"""Placing tables: what must hold for any tables and machine, and the sizes that others have published."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.dlrm.options import SHARDING_KINDS
from sluice.dlrm.sharding.placement import TARGET, cuts
from sluice.dlrm.sharding.shard_sizes import DoesNotFit, PlacementError, Storage
from tests.product import TrainingMachine, place
from tests.raises import MISTAKES, raises


@dataclass(frozen=True)
class T:
    name: str
    rows: int
    width: int = 16
    lookups: float = 1.0
    use: tuple[tuple[int, int, float], ...] = ()


def made(rows, lookups=None, width=16):
    lookups = lookups or [1.0] * len(rows)
    return [T(f"t{i}", r, width, n) for i, (r, n) in enumerate(zip(rows, lookups, strict=True))]


TABLES = st.lists(
    st.tuples(
        st.integers(1, 10**7), st.sampled_from([4, 8, 16, 64, 100, 128]), st.floats(0.01, 100)
    ),
    min_size=1,
    max_size=40,
)


def ranks_of(memory: int = 10**12, *, ranks: int = 2, **more) -> TrainingMachine:
    """Ranks whose memory is all for tables."""
    return TrainingMachine(ranks=ranks, memory_bytes=memory, reserve=0, **more)


@settings(max_examples=60)
@given(
    TABLES,
    st.sampled_from([1, 2, 3, 4, 8, 16]),
    st.sampled_from(["rowwise_adagrad", "adam", "sgd"]),
)
def test_every_cell_of_every_table_lies_on_exactly_one_rank(shapes, ranks, optimiser):
    tables = [T(f"t{i}", r, w, n) for i, (r, w, n) in enumerate(shapes)]
    storage = Storage(optimiser=optimiser)
    placement = place(tables, ranks_of(ranks=ranks), storage)
    assert [p.name for p in placement.places] == [t.name for t in tables]
    for p, t in zip(placement.places, tables, strict=True):
        assert sum(part.rows * part.width for part in p.parts) == t.rows * t.width
        assert len({part.rank for part in p.parts}) == len(p.parts)
        assert all(part.rank in range(ranks) and part.width % 4 == 0 for part in p.parts)
        assert p.kind in SHARDING_KINDS
        assert (p.kind == "table") == (len(p.ranks) == 1)
        if p.kind != "column":  # by columns, each part keeps a row-wise state of its own
            assert p.bytes == storage.total(t.rows, t.width)
        assert sum(part.reads for part in p.parts) == pytest.approx(t.lookups * t.width * 4)


@settings(max_examples=60)
@given(TABLES, st.sampled_from([2, 4, 8]))
def test_where_the_tables_allow_the_ranks_are_balanced(shapes, ranks):
    """Tables with many rows for each rank can always be cut evenly, so any such set can be balanced."""
    tables = [T(f"t{i}", max(r, 100 * ranks), w, n) for i, (r, w, n) in enumerate(shapes)]
    placement = place(tables, ranks_of(ranks=ranks))
    assert max(placement.balance) <= TARGET
    assert placement == place(tables, ranks_of(ranks=ranks)), "the same tables, another place"


def test_no_table_is_cut_without_need():
    placement = place(made([1000] * 8), ranks_of(ranks=4))
    assert {p.kind for p in placement.places} == {"table"}
    assert placement.balance == (1.0, 1.0)


def test_what_is_missing_is_exact():
    tables = made([1_000_000] * 4)  # 64 MB and 4 MB of state each
    enough = 4 * 68_000_000 // 2
    assert place(tables, ranks_of(enough)).loads("bytes")[0] == enough
    with raises(DoesNotFit, "3 such ranks") as caught:
        place(tables, ranks_of(enough - 1))
    assert caught.value.missing == 2


def test_memory_is_kept_where_balance_would_break_it():
    """A rank with little memory gets no more than fits, whatever its reads."""
    tables = made([10_000, 10_000, 10_000], [100.0, 1.0, 1.0])
    placement = place(tables, ranks_of(680_000, ranks=3))
    assert max(placement.loads("bytes")) <= 680_000


def test_a_hot_table_of_too_few_rows_is_cut_by_columns():
    placement = place(
        [T("hot", 3, 64, 100.0), T("cold", 100_000, 64)],
        ranks_of(ranks=4),
    )
    assert placement.places[0].kind == "column"
    assert len(placement.places[0].ranks) == 4


def test_what_cannot_be_cut_so_is_refused_with_what_can():
    assert cuts(T("t", 3, 16), 4) == ["column"]
    assert cuts(T("t", 3, 4), 4) == []
    with raises(PlacementError, "3 rows × 16", "by row over 4 ranks", "table or column"):
        place([T("t", 3, 16)], ranks_of(ranks=4), asked={"t": "row"})


def test_on_a_gpu_the_largest_tables_spill_to_the_hosts_and_only_as_many_as_must():
    tables = made([1_000_000, 500_000, 1000])  # 68, 34 and 0.07 MB with their states
    placement = place(
        tables,
        ranks_of(30_000_000, host_memory_bytes=40_000_000),
    )
    assert [p.kernel for p in placement.places] == ["uvm_caching", "fused", "fused"]
    assert "spilled" in placement.places[0].why
    assert max(placement.loads("bytes")) <= 30_000_000
    assert max(placement.loads("host_bytes")) <= 40_000_000
    assert sum(p.bytes for p in placement.places) == sum(
        Storage().total(t.rows, t.width) for t in tables
    )
    for machine in (
        ranks_of(30_000_000),
        ranks_of(30_000_000, host_memory_bytes=10_000_000),
        ranks_of(30_000_000, host_memory_bytes=40_000_000, device="cpu"),
    ):
        with pytest.raises(DoesNotFit):
            place(tables, machine)


@pytest.mark.parametrize(("kind", "device", "facts"), MISTAKES["kernel"])
def test_a_choice_without_a_kernel_is_refused(kind, device, facts):
    with raises(PlacementError, *facts):
        place(
            made([100]),
            ranks_of(ranks=6, device=device),
            asked={"t0": kind},
        )


@pytest.mark.parametrize(
    "storage", [Storage(dtype="fp16"), Storage(dtype="bf16"), Storage(optimiser="adam")]
)
def test_copies_are_refused_where_their_update_would_be_another_than_other_tables(storage):
    with raises(PlacementError, "'t0'", "copies", "fp32", "rowwise_adagrad"):
        place(made([100]), ranks_of(), storage, {"t0": "data"})
