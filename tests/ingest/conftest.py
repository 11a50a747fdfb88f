"""A small feature table that many tests read and none changes."""

from __future__ import annotations

import pytest

from benchmarks.small_table import small_table
from sluice.etl.table.table import FeatureTable


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> FeatureTable:
    """4,000 training rows in 3 files, row groups of 256 and what is left over."""
    return small_table(
        tmp_path_factory.mktemp("table") / "clicks", rows=5000, files=3, row_group_rows=256
    )
