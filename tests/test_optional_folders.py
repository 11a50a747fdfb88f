"""The optional folders can be deleted: nothing that stays imports them, and what is asked for them says so."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from tests.optional_folders import OPTIONAL, ROOT, OptionalFolder
from tests.raises import assert_names
from tests.test_architecture import import_nodes

PLACES = ("sluice", "etl", "ingest", "agent", "dlrm", "benchmarks", "examples", "tests")
every = pytest.mark.parametrize(
    "folder", [pytest.param(one, id=name) for name, one in OPTIONAL.items()]
)


@cache
def imported(path: Path) -> set[str]:
    """Every module that a file imports, early, late or under a condition."""
    found = set()
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def belongs(module: str, folder: OptionalFolder) -> bool:
    tests = tuple(path.replace("/", ".") for path in folder.tests)
    names = (*folder.modules, *tests)
    return any(
        name == own or name.startswith(f"{own}.")
        for name in (module, f"sluice.{module}")
        for own in names
    )


@every
def test_nothing_that_stays_imports_it(folder):
    """So every remaining module is imported, and every remaining test collected, as if it had never been there."""
    files = {
        str(path.relative_to(ROOT)): path
        for place in PLACES
        for path in (ROOT / place).rglob("*.py")
    }
    stays = {name: path for name, path in files.items() if not folder.holds(name)}
    assert not folder.is_there or len(stays) < len(files)
    wrong = [
        f"{name} imports {module}"
        for name, path in stays.items()
        if name not in folder.askers
        for module in imported(path)
        if belongs(module, folder)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """The product's sources without any optional folder."""
    copy = tmp_path_factory.mktemp("bare")
    (copy / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    for package in ("sluice", "etl", "ingest", "agent", "dlrm"):
        shutil.copytree(
            ROOT / package,
            copy / package,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
        )
    for folder in OPTIONAL.values():
        for path in folder.paths:
            if (copy / path).is_dir():
                shutil.rmtree(copy / path)
            else:
                (copy / path).unlink(missing_ok=True)
    return copy


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("sluice.agent.lab.simulate --policy autotune", ["'autotune'", "installed package"]),
        ("sluice.agent.lab.policies --live-only", ["benchmarks/rivals"]),
        (
            f"sluice etl --engine local --spec {ROOT}/features/criteo.toml --input i --output o",
            ["--engine local", "spark-submit"],
        ),
        ("sluice serve run", ["`sluice serve`", "dlrm/serving"]),
        ("sluice worker --table t --token-file f", ["`sluice worker`", "ingest/remote"]),
    ],
)
def test_a_command_that_lacks_its_folder_names_it_in_one_line(bare, tmp_path, words, facts):
    # -S leaves out the hook of an editable install, which would find the folders that are missing in the copy.
    path = os.pathsep.join([str(bare), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [sys.executable, "-S", "-m", *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 2
    assert_names(done.stderr, *facts)
    assert len(done.stderr.splitlines()) == 1
