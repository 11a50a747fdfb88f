"""The recipes of docs/recipes.md on synthetic lines, with sizes made small: the harder one from lines to an AUC."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.common.settings import make
from sluice.dlrm.options import Config, parse
from sluice.etl.spec.spec import Spec
from tests.dlrm.rig import SMALL_MODEL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = (
    *SMALL_MODEL,
    "--batch-size",
    "512",
    "--epochs",
    "1",
    "--evals",
    "1",
)


def recipe(name: str, lines: Path, out: Path, *words: str, **environment: str) -> dict:
    (out / "tmp").mkdir(parents=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["sh", ROOT / "examples" / "recipes" / name, lines, out, *SMALL, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "PATH": path,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "RANKS": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(out / "tmp"),
            **environment,
        },
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1])


def synthetic(*words: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "etl", "synth", "--rows", "20000", "--seed", "1", *map(str, words)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )


@pytest.mark.timeout(400)
def test_terabyte_from_days_to_an_auc(tmp_path):
    """The other script does less of the same, as the demo does; it is read below."""
    synthetic("--days", 2, "--out", tmp_path / "days")
    spec = tmp_path / "spec.toml"  # the same columns, without the 20 GB tables of the five largest
    text = (ROOT / "features" / "criteo_terabyte.toml").read_text()
    spec.write_text(text.replace("size = 40000000", "size = 4000").replace("4194304", "8192"))
    found = recipe(
        "criteo_terabyte.sh",
        tmp_path / "days",
        tmp_path / "out",
        "--cross-rank",
        "4",
        LAST="1",
        SPEC=str(spec),
    )
    assert found["rows"] == 5000  # the second half of the last day
    assert found["auc"] > 0.55


@pytest.mark.parametrize("name", ["criteo_kaggle", "criteo_terabyte"])
def test_settings_and_spec_of_a_recipe_are_good(name):
    spec = Spec.read(ROOT / "features" / f"{name}.toml")
    assert sum(c.role == "sparse" for c in spec.columns) == 26
    text = (ROOT / "examples" / "recipes" / f"{name}.sh").read_text().replace("\\\n", " ")
    words = re.search(r"dlrm\.train (.*) \"\$@\"", text)
    assert words is not None
    assert make(Config, parse([*words[1].split(), "--check"]), version=0).epochs >= 1
