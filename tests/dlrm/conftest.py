"""Fixtures that several of this folder's files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dlrm import hostile_table, transformed_table
from tests.dlrm.forks import Forks


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose record names a function of a module that lies in the table, and a run over it."""
    folder = tmp_path_factory.mktemp("hostile")
    hostile_table.make(folder)
    return folder


@pytest.fixture(scope="session")
def transformed(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """A table whose spec has transforms, and a run of one epoch over it."""
    folder = tmp_path_factory.mktemp("transforms")
    transformed_table.write(folder, forks)
    return folder


@pytest.fixture
def ran(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Whether the module was imported; it could be, as if the program were started in the table's folder."""
    hostile_table.forget(hostile)
    monkeypatch.chdir(hostile / "table")
    monkeypatch.syspath_prepend(str(hostile / "table"))
    return (hostile / "mark").exists
