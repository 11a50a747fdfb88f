"""A small feature table that many tests read and none changes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.small_table import small_table
from sluice import FeatureTable
from tests.ingest.scene import Scene


@pytest.fixture(scope="session")
def table(tmp_path_factory: pytest.TempPathFactory) -> FeatureTable:
    """4,000 training rows in 3 files, row groups of 256 and what is left over."""
    return small_table(
        tmp_path_factory.mktemp("table") / "clicks", rows=5000, files=3, row_group_rows=256
    )


@pytest.fixture(scope="module")
def server():
    from tests.ingest.s3 import S3Server  # moto takes long to import

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Where worker functions of the test hold items."""
    monkeypatch.setenv("SLUICE_TEST_DIR", str(tmp_path))
    scene = Scene(tmp_path)
    yield scene
    scene.close()
