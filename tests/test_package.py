"""One name on the import path: what a wheel installs, and that a checkout and a wheel are imported alike."""

import json
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

from sluice.__main__ import VERBS, main
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


def test_nothing_in_the_wheel_imports_the_lab_or_the_rivals(wheel):
    left_out = re.compile(
        rb"^\s*(from|import) sluice\.(agent\.lab|agent import lab|benchmarks)\b", re.M
    )
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".py")]
        importers = [name for name in modules if left_out.search(archive.read(name))]
    assert importers == []
    assert left_out.search((ROOT / "agent/lab/judge.py").read_bytes())


def test_the_workflow_tests_the_versions_of_python_that_the_package_names():
    """The set-up and the pages name the same ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python" in line]
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]},<3.15"
    for path in ("README.md", "docs/tutorial.md", ".ci/setup"):
        assert f"Python {named[0]} to {named[-1]}" in (ROOT / path).read_text(), path


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


PROGRAMS = [
    *(f"sluice {verb}" for verb in VERBS),
    "sluice",
    "etl/job.py",
    "etl",
    "ingest",
    "agent",
    "sluice.agent.lab.simulate",
    "dlrm.train",
    "examples.demo",
]
LARGE = ("numpy", "pyarrow", "torch", "torchrec", "pyspark", "petastorm", "pandas")
HELP_OF_ALL = f"""
import contextlib, io, json, os, runpy, sys
leave, os._exit = os._exit, sys.exit
for program in {PROGRAMS}:
    if os.fork():
        os.wait()
        continue
    module, *verb = program.split()
    sys.argv = [module, *verb, "--help"]
    with contextlib.redirect_stdout(out := io.StringIO()):
        try:
            if module.endswith(".py"):
                runpy.run_path(module, run_name="__main__")
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([program, code, out.getvalue(), [*sys.modules]]), flush=True)
    leave(0)
"""


@pytest.fixture(scope="module")
def helps():
    """The exit code, the text and the loaded modules of each program, each in a new process."""
    done = start("-c", HELP_OF_ALL)
    return {program: told for program, *told in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_loads_no_large_library(helps, name):
    code, text, loaded = helps[name]
    assert code == 0
    assert "sluice.common" in loaded
    assert not set(loaded) & set(LARGE)
    assert "usage: " in text


def left():
    """The command lines that the changelog says left in this release, without an option's value. A bare option was one
    of `train`."""
    changes = (ROOT / "CHANGELOG.md").read_text().partition("### Removed")[2].partition("## 0.3")[0]
    for cell in re.findall(r"^\| (.+?) \|", changes, re.M):
        for words in re.findall("`([^`]+)`", cell):
            match = re.fullmatch(r"(?:sluice ([a-z]+))? ?(--[a-z-]+)?(?: .*)?", words)
            if match and (match[2] or match[1] not in VERBS):
                yield " ".join(filter(None, (match[1] or "train", match[2])))


@pytest.mark.parametrize("words", sorted({*left(), "evalute"}))
def test_a_verb_or_an_option_that_there_is_not_is_answered(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["sluice", *words.split(), "--help"])
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    answer = f" '{words.split()[-1]}', which was in an earlier version: "
    if words == "evalute":
        answer = "error: no command 'evalute' (did you mean 'evaluate'?)"
    assert answer in capsys.readouterr().err.splitlines()[0]
