"""Times since 1970 are recognised by their values, and a column without known values is no time."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.ingest.plain.guess import proposals
from sluice.ingest.read.source_files import facts_of

UNITS = (1, 10**3, 10**6, 10**9)


@pytest.mark.parametrize("has_statistics", [True, False])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    unit=st.sampled_from(UNITS),
    seconds=st.lists(st.none() | st.integers(1_000_000_000, 2_000_000_000), min_size=2, max_size=9),
)
def test_whole_numbers_are_times_if_they_are_known_to_lie_in_a_unit(
    tmp_path, has_statistics, unit, seconds
):
    values = [None if at is None else at * unit for at in seconds]
    table = pa.table({"x": pa.array(values, pa.int64()), "click": [0, 1] + [0] * (len(values) - 2)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2, write_statistics=has_statistics)
    facts, rows, _, _ = facts_of(str(tmp_path))
    guessed = proposals(facts, rows)["x"]
    known = [at for at in seconds if at]
    is_known = known and max(known) >= min(known) + 3600
    assert (guessed.time, guessed.unit) == (("int", unit) if is_known else ("", 1))
