"""How a Spark session begins: with shuffles as wide as the input needs."""

import pytest

from sluice.etl.spark.session import partitions_for


@pytest.mark.parametrize(
    ("mib", "cores", "partitions"), [(0, 2, 2), (25, 2, 2), (65, 2, 3), (12_500, 4, 391)]
)
def test_partitions_follow_the_input(mib, cores, partitions):
    assert partitions_for(mib * 2**20, cores) == partitions
