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

from sluice.__main__ import LEFT, VERBS, main
from tests.optional_folders import is_left_out
from tests.run_program import run_program

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("etl", "ingest", "agent", "dlrm")


def start(*words: object, folder: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder."""
    return run_program(*words, cwd=folder, env={**os.environ, **more})


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
    code = "from sluice.agent import controller; from sluice import Knobs, Loader; print(controller.__file__)"
    (tmp_path / "script.py").write_text(code)
    done = start("script.py", folder=tmp_path, PYTHONPATH=str(site))
    assert Path(done.stdout.strip()).is_relative_to(site), done.stderr


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
    done = start("-m", "sluice", "--help", folder=tmp_path, PYTHONPATH=str(tmp_path))
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
    done = start("-X", "importtime", *PROGRAMS[name], "--help", COLUMNS="72")
    assert done.returncode == 0, done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "sluice.common" in loaded
    assert not loaded & set(LARGE)
    texts = [line for line in done.stdout.splitlines() if line[:1].isalpha()]
    assert texts
    assert max(map(len, texts)) <= 72, "paragraphs are wrapped"


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("evalute", "error: there is no verb 'evalute' (did you mean 'evaluate'?)"),
        *((verb, f"error: Sluice no longer has `{verb}`: {why}") for verb, why in LEFT.items()),
    ],
)
def test_a_verb_that_there_is_not_is_answered(monkeypatch, capsys, verb, answer):
    monkeypatch.setattr(sys, "argv", ["sluice", verb, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", answer)
