"""Fixtures that several of this folder's files share."""

from pathlib import Path

import pytest

from tests.dlrm import clicks_table
from tests.dlrm.forks import Forks
from tests.dlrm.rig import run_words

ROWS = 3000


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """A table of clicks, and a run of one epoch over it, of 38 steps."""
    path = tmp_path_factory.mktemp("serving")
    clicks_table.write(path / "table", clicks_table.raw_rows(ROWS))
    forks.train(*run_words(path, "--width 16 --batch-size 64 --save-every 30"), tmp=path)
    return path
