"""One name on the import path: what a wheel installs, and that a checkout and a wheel are imported alike."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from sluice.__main__ import LEFT, VERBS
from tests.optional_folders import is_left_out

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("etl", "ingest", "agent", "dlrm")


def run(code: str, folder: Path, path: Path = ROOT) -> str:
    """Python in `folder`, as a script that lies there would run it, with `path` where packages are installed."""
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, folder / "script.py"],
        cwd=folder,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_installs_nothing_but_sluice(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sluice", "sluice_recsys"}
    ours = {
        str(Path("sluice", p.relative_to(ROOT)))
        for room in ROOMS
        for p in (ROOT / room).rglob("*.py")
        if not p.is_relative_to(ROOT / "agent" / "lab")
    }
    assert ours <= set(names)
    assert not [name for name in names if name.startswith("sluice/agent/lab")]
    assert {n for n in names if n.endswith((".html", ".safetensors", ".json"))}, (
        "what modules read lies beside them"
    )


def test_nothing_in_the_wheel_imports_the_lab(wheel):
    lab = re.compile(
        rb"^\s*(from sluice\.agent\.lab\b|from sluice\.agent import lab|import sluice\.agent\.lab)",
        re.M,
    )
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".py")]
        assert [name for name in modules if lab.search(archive.read(name))] == []
    assert lab.search((ROOT / "agent/lab/policies.py").read_bytes())


def test_the_workflow_tests_the_versions_of_python_that_the_package_names():
    """The set-up and the pages name the same ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python" in line]
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"
    for path in ("README.md", "docs/tutorial.md", ".ci/setup"):
        assert f"Python {named[0]} to {named[-1]}" in (ROOT / path).read_text(), path


def test_a_wheel_works_with_a_users_folders_of_the_same_names(wheel, tmp_path):
    """Somebody's `agent/` and `etl/` are theirs; ours are parts of `sluice`."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(
            "raise ImportError('this is the user\\'s own folder')\n"
        )
    found = run(
        "from sluice.agent import controller; from sluice import Knobs, Loader; print(controller.__file__)",
        tmp_path,
        site,
    )
    assert Path(found).is_relative_to(site)


def test_a_checkout_without_links_says_so_in_one_sentence(tmp_path):
    """As git leaves it with core.symlinks=false: a link is then a small file with the name of its target."""
    shutil.copytree(
        ROOT / "sluice",
        tmp_path / "sluice",
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tmp_path / "pyproject.toml").touch()
    for room in ROOMS:
        link = tmp_path / "sluice" / room
        link.unlink()
        link.write_text(f"../{room}")
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "--help"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "git config core.symlinks true" in done.stderr


PROGRAMS = {
    **{
        f"sluice {verb}": ["-m", "sluice", verb]
        for verb, (module, _, _) in VERBS.items()
        if not is_left_out(f"{module.removeprefix('sluice.').replace('.', '/')}.py")
    },
    "sluice": ["-m", "sluice"],
    "etl/job.py": ["etl/job.py"],
    **{
        name: ["-m", name]
        for name in (
            "etl",
            "ingest",
            "agent",
            "sluice.agent.lab.policies",
            "sluice.agent.lab.simulate",
            "sluice.agent.lab.teach",
            "dlrm.train",
            "examples.demo",
        )
    },
}
LARGE = ("numpy", "pyarrow", "numba", "torch", "torchrec", "pyspark", "petastorm", "pandas")


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_loads_no_large_library_and_is_wrapped_at_the_width(name):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *PROGRAMS[name], "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "72"},
        text=True,
        capture_output=True,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "sluice.common" in loaded
    assert not loaded & set(LARGE)
    texts = [line for line in done.stdout.splitlines() if line[:1].isalpha()]
    assert texts
    assert max(map(len, texts)) <= 72, "paragraphs are wrapped"


@pytest.mark.parametrize("verb", LEFT)
def test_a_verb_that_left_answers_with_one_sentence(verb):
    done = subprocess.run(
        [sys.executable, "-m", "sluice", verb, "--help"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: Sluice no longer has `{verb}`: {LEFT[verb]}\n"


def test_a_misspelt_verb_is_corrected_and_a_verb_answers_for_help():
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "evalute"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert "evaluate" in done.stderr.splitlines()[0]
    help_ = subprocess.run(
        [sys.executable, "-m", "sluice", "bench", "--help"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert help_.returncode == 0
    assert "--batch-size" in help_.stdout
