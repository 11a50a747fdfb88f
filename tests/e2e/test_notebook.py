"""examples/tuned_loop.ipynb: its cells run one after another in any folder, without Jupyter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "tuned_loop.ipynb"
RUNNER = """
import json, sys
names = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    exec(compile(source, "cell", "exec"), names)
"""


def test_its_cells_run_from_any_folder_and_show_what_the_agent_did(tmp_path):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = "\0".join("".join(one["source"]) for one in cells if one["cell_type"] == "code")
    assert "SECONDS = 15\n" in sources
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(sources.replace("SECONDS = 15\n", "SECONDS = 6\n").split("\0")),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(" rows/s") >= 3
    assert "auto: " in done.stdout
    assert "at fetch=" in done.stdout
    (folder,) = tmp_path.glob("sluice-notebook-*")
    assert (folder / "run" / "report.html").is_file()
