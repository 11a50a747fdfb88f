"""`.ci/plain.py`: each room has a budget, with 3 % of slack; what is hard to read has none."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.raises import raises

SCRIPT = Path(__file__).parent.parent / ".ci" / "plain.py"
GOOD = '"""Reads rows."""\n'
LONG = '"""' + "word " * 31 + '."""\n'
ROOMS = ("etl", "ingest", "agent", "dlrm", "sluice", "benchmarks", "examples", "tests")


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """Runs the script in a project of one module and a README, which may have 100 tokens a room and 100 lines of C."""
    script = tmp_path / ".ci" / "plain.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text())
    (tmp_path / "etl").mkdir()
    (tmp_path / "etl" / "one.py").write_text(GOOD)
    (tmp_path / "README.md").write_text("Sluice reads rows.\n")
    budgets = json.loads(SCRIPT.with_name("plain.json").read_text())
    small = {name: 100 if name in (*ROOMS, "lines of C") else 0 for name in budgets}
    script.with_name("plain.json").write_text(json.dumps(small))
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", [str(script), *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return ended.value.code

    return run


@pytest.mark.parametrize(
    ("path", "text", "measure"),
    [
        ("etl/two.py", LONG, "long sentences"),
        ("etl/two.py", '"""Whoever reads."""\n', "no subject"),
        ("etl/two.py", GOOD + "def f():\n" + "    x = 1\n" * 60, "long functions"),
        *((f"{room}/two.py", GOOD + "x = 1\n" * 35, room) for room in ROOMS),
        ("etl/two.c", "int x;\n" * 104, "lines of C"),
        ("etl/two.c", "/* " + "x" * 98 + "\n", "long lines of C"),
        ("README.md", "Of this it is no part.\n", "no subject"),
        ("README.md", "word " * 1001, "README.md"),
    ],
)
def test_a_count_above_its_budget_is_refused_by_name(run_script, capfd, path, text, measure):
    assert run_script() == 0
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(text)
    assert run_script() == 1
    assert f"plain: {measure}: " in capfd.readouterr().err


@pytest.mark.parametrize(("tokens", "code"), [(100, 0), (103, 0), (104, 1)])
def test_a_room_may_be_three_percent_above_its_budget(run_script, tokens, code):
    Path("etl/one.py").unlink()
    Path("etl/two.py").write_text("x\n" * tokens)
    assert run_script() == code


def test_without_a_budget_nothing_passes(run_script):
    Path(".ci/plain.json").write_text(json.dumps({"etl": 100}))
    with raises(KeyError, "ingest"):
        run_script()


def test_code_behind_a_link_counts_once(run_script):
    Path("sluice").mkdir()
    Path("sluice/etl").symlink_to("../etl")
    Path("etl/two.py").write_text("x\n" * 90)
    Path("sluice/one.py").write_text("x\n" * 90)
    assert run_script() == 0
