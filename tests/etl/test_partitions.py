"""How a Spark session begins: shuffles as wide as the input needs, and a worker while the driver works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sluice.etl.spark.session import fit_partitions, partitions_for


@pytest.mark.parametrize(
    ("mib", "cores", "partitions"), [(0, 2, 2), (25, 2, 2), (65, 2, 3), (12_500, 4, 391)]
)
def test_partitions_follow_the_input(mib, cores, partitions):
    assert partitions_for(mib * 2**20, cores) == partitions


@pytest.mark.parametrize("said", [True, False])
def test_what_a_user_says_of_partitions_stands(said):
    found: dict[str, str] = {}
    context = SimpleNamespace(
        getConf=lambda: SimpleNamespace(contains=lambda _key: said), defaultParallelism=2
    )
    fit_partitions(
        SimpleNamespace(sparkContext=context, conf=SimpleNamespace(set=found.__setitem__)),
        200 * 2**20,
    )
    assert found == ({} if said else {"spark.sql.shuffle.partitions": "7"})
