"""`.ci/plain.py`: the counts of what is hard to read may fall and not rise."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.raises import raises

SCRIPT = Path(__file__).parent.parent / ".ci" / "plain.py"
GOOD = '"""Reads rows."""\n'
LONG = '"""' + "word " * 31 + '."""\n'


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Runs the script in a project of one module and a README, whose limits equal its counts."""
    script = tmp_path / ".ci" / "plain.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text())
    (tmp_path / "etl").mkdir()
    (tmp_path / "etl" / "one.py").write_text(GOOD)
    (tmp_path / "README.md").write_text("Sluice reads rows.\n")
    script.with_name("released.json").write_text(json.dumps({"product": 100, "tests": 100}))
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return ended.value.code

    assert run("--lower") == 0
    return run


@pytest.mark.parametrize(
    ("path", "text", "measure"),
    [
        ("etl/two.py", LONG, "long sentences"),
        ("etl/two.py", '"""Whoever reads."""\n', "no subject"),
        ("etl/two.py", GOOD + "def f():\n" + "    x = 1\n" * 60, "long functions"),
        ("etl/two.py", GOOD + "x = (1, 2)\n", "product"),
        ("benchmarks/two.py", GOOD, "benchmarks"),
        ("README.md", "Of this it is no part.\n", "no subject"),
        ("README.md", "word " * 1001, "README.md"),
    ],
)
def test_a_count_that_rises_is_refused_by_name(run_script, capfd, path, text, measure):
    assert run_script() == 0
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(text)
    assert run_script() == 1
    assert f"plain: {measure}: " in capfd.readouterr().err


def test_without_limits_nothing_passes(run_script):
    Path(".ci/plain.json").unlink()
    with raises(FileNotFoundError, "plain.json"):
        run_script()


def test_a_limit_is_lowered_and_never_raised(run_script):
    limits = Path(".ci/plain.json")
    Path("etl/two.py").write_text(LONG)
    run_script("--lower")
    assert json.loads(limits.read_text())["long sentences"] == 0
    Path("etl/one.py").unlink()
    Path("etl/two.py").unlink()
    run_script("--lower")
    assert json.loads(limits.read_text())["product"] == 0


@pytest.mark.parametrize("earlier", ["released", "last commit", "parent"])
def test_a_limit_above_an_earlier_one_is_refused(run_script, capfd, earlier):
    limits = Path(".ci/plain.json")
    low, high = ({**json.loads(limits.read_text()), "product": count} for count in (50, 60))
    if earlier == "released":
        Path(".ci/released.json").write_text(json.dumps(low))
    commit_limits(*(low if earlier == name else high for name in ("parent", "last commit")))
    limits.write_text(json.dumps(high))
    assert run_script() == 1
    assert "product: its limit of 60 is above the 50 of " in capfd.readouterr().err
    limits.write_text(json.dumps(low))
    assert run_script() == 0


def test_a_history_that_is_cut_off_is_refused(run_script, capfd):
    commit_limits(*[json.loads(Path(".ci/plain.json").read_text())] * 2)
    run_git("clone", "-q", "--depth=1", f"file://{Path.cwd()}", "shallow")
    Path(".git").rename("whole")
    Path("shallow/.git").rename(".git")
    assert run_script() == 1
    assert "fetch the history" in capfd.readouterr().err


def commit_limits(*limits: dict[str, int]) -> None:
    """Commits limits one after the other."""
    run_git("init", "-q", "-b", "main")
    for name in ("name", "email"):
        run_git("config", f"user.{name}", "test")
    for counts in limits:
        Path(".ci/plain.json").write_text(json.dumps(counts))
        run_git("add", ".ci/plain.json")
        run_git("commit", "-q", "--allow-empty", "-m", "Limits")


def run_git(*words: str) -> None:
    subprocess.run(["git", *words], check=True)
