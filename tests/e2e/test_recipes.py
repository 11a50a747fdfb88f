"""The recipes of docs/recipes.md on synthetic lines, with sizes made small: the harder one from lines to an AUC."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.common.settings import make
from sluice.dlrm.options import parse
from tests.dlrm.rig import SMALL_MODEL, environment
from tests.product import Config, Spec, synthesize

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = (*SMALL_MODEL, "--batch-size=512", "--epochs=1", "--evals=1", "--cross-rank=4")
PROGRAMS = {
    "spark-submit": 'shift 3\nexec python -m etl.job "$@"',
    "torchrun": '[ "$1" = --nproc-per-node=1 ]\nshift\nexec python "$@"',
}
"""What the script calls, without Java and torchrun: the demo's test calls both."""


@pytest.mark.timeout(400)
def test_terabyte_from_days_to_an_auc(tmp_path):
    """The other script does less of the same, as the demo does; it is read below."""
    synthesize(tmp_path / "days", rows=20_000, days=2, seed=1)
    spec = tmp_path / "spec.toml"  # the same columns, without the 20 GB tables of the five largest
    text = (ROOT / "features" / "criteo_terabyte.toml").read_text()
    spec.write_text(text.replace("size = 40000000", "size = 4000").replace("4194304", "8192"))
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh -e\n{script}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "examples/recipes/criteo_terabyte.sh", tmp_path / "days", tmp_path / "out", *SMALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **environment(tmp_path),
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RANKS": "1",
            "LAST": "1",
            "SPEC": str(spec),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["rows"] == 5000  # the second half of the last day
    assert last["auc"] > 0.55


@pytest.mark.parametrize("name", ["criteo_kaggle", "criteo_terabyte"])
def test_settings_and_spec_of_a_recipe_are_good(name):
    spec = Spec.read(ROOT / "features" / f"{name}.toml")
    assert sum(c.role == "sparse" for c in spec.columns) == 26
    text = (ROOT / "examples" / "recipes" / f"{name}.sh").read_text().replace("\\\n", " ")
    words = re.search(r"dlrm\.train (.*) \"\$@\"", text)
    assert words is not None
    assert make(Config, parse([*words[1].split(), "--check"]), version=0).epochs >= 1
