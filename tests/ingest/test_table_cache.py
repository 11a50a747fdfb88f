"""A cache of what a feature table's transforms make: the same batches, and the second run finds them."""

from dataclasses import replace

import pytest

from sluice import Loader
from sluice.etl.spec.permission import Permission
from sluice.etl.spec.table_transform import short_transforms
from sluice.ingest.cache.choice import CacheCosts
from sluice.testing import assert_resumes, assert_resumes_on, assert_same_order
from tests.dlrm import clicks_table
from tests.raises import assert_names

MIXED = "tests.ingest.cached_functions:mixed:I1,I2,C1>I1,sum,pair=50"
DOUBLED = "tests.ingest.cached_functions:doubled:I2>I2"


@pytest.fixture(autouse=True)
def worth_it(monkeypatch):
    monkeypatch.setattr(CacheCosts, "is_worth_it", property(lambda _: True))


def _open(table, *transforms, **options):
    options = {
        "batch_size": 64,
        "tuning": "fixed",
        "as_": "numpy",
        "read_ahead_epochs": 2,
    } | options
    code = ["tests.ingest.cached_functions"]
    made = replace(table, permission=Permission.of(code)).transformed(short_transforms(transforms))
    return Loader(made, **options)


def _load(table, *transforms, **options):
    """Returns the bytes of all columns of two epochs, and what the cache did."""
    with _open(table, *transforms, **options) as loader:
        batches = [
            {name: _bytes(values) for name, values in batch.items()}
            for _ in range(2)
            for batch in loader
        ]
        return batches, loader.tunable.outcome().get("cache")


def _bytes(values):
    """The types and bytes of a column. Those of bags come as their ids and their lengths."""
    if isinstance(values, tuple):
        return list(map(_bytes, values))
    return str(values.dtype), values.tobytes()


@pytest.mark.parametrize(
    "rest", [(), (DOUBLED,), (f"{DOUBLED}@pure",)], ids=["one", "impure", "two"]
)
def test_batches_are_the_same_and_the_second_run_finds_them(table, tmp_path, rest):
    plain, nothing = _load(table, MIXED, *rest)
    assert nothing is None
    assert {"sum", "pair"} <= plain[0].keys()
    first, figures = _load(table, f"{MIXED}@pure", *rest, cache=tmp_path / "made")
    assert first == plain
    assert figures["rows_read"] > 0
    second, again = _load(table, f"{MIXED}@pure", *rest, cache=tmp_path / "made")
    assert second == plain
    # A sample tells that the entries of a single function hold. Of two, the first read is computed.
    assert again["rows_made"] < (1000 if len(rest) and "@pure" in rest[0] else 1)


def test_it_resumes_and_has_the_same_order_on_each_number_of_ranks(table, tmp_path):
    def make(rank=0, ranks=1):
        return _open(
            table, f"{MIXED}@pure", cache=tmp_path / "made", rank=rank, ranks=ranks, as_="batch"
        )

    assert_same_order(make, epochs=2)
    assert_resumes(make, at=[0, 1, 30])
    assert_resumes_on(make, key="sum", ranks=(1, 2))


@pytest.mark.parametrize(
    ("transforms", "facts"),
    [
        ([MIXED], ["@pure"]),
        ([DOUBLED, f"{MIXED}@pure"], ["@pure"]),
        (["tests.ingest.cached_functions:with_mean:I1>I1@pure"], ["I1", "not pure"]),
    ],
    ids=["unmarked", "behind another", "of all rows"],
)
def test_what_may_not_be_kept_is_said_and_computed(table, tmp_path, capsys, transforms, facts):
    _load(table, *transforms, cache=tmp_path / "made")
    assert_names(capsys.readouterr().err, "cache", *facts)
    assert not list((tmp_path / "made").glob("*.arrow"))


def test_a_column_whose_operators_are_left_to_the_loader_is_given_to_batches(tmp_path):
    table = clicks_table.write(tmp_path / "table", clicks_table.raw_rows(600))
    assert {f.name for f in table.stored if f.online} >= {"I2"}
    function = "tests.ingest.cached_functions:third:I1>I2"
    plain, _ = _load(table, function)
    assert _load(table, f"{function}@pure", cache=tmp_path / "made")[0] == plain
