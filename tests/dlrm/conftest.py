"""Fixtures that several of this folder's files share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture
def holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, Path]:
    """Has `torch.zeros` take whatever is large from a file with holes; its number of elements → that file."""
    import torch

    files: dict[int, Path] = {}
    zeros = torch.zeros

    def lazily(*size: Any, dtype: Any = None, **more: Any) -> torch.Tensor:
        shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
        count, kind = math.prod(map(int, shape)), dtype or torch.float32
        if count < 2**28:
            return zeros(*size, dtype=dtype, **more)
        files[count] = tmp_path / f"{count} {kind}"
        return torch.from_file(str(files[count]), shared=True, size=count, dtype=kind).view(*shape)

    monkeypatch.setattr(torch, "zeros", lazily)
    return files
