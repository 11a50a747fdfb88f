"""The demo with few rows: every step for real, and an interrupt in the middle of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_ends_on_a_report(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "dlrm.demo", "--out", tmp_path / "out", "--rows", "40000", "--bench-seconds", "3"],
        capture_output=True, text=True, timeout=390, check=False, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert result.returncode == 0, result.stderr[-4000:]
    last = json.loads(result.stdout.splitlines()[-1])
    assert 0.5 < last["auc"] < last["bayes_auc"] < 1
    assert last["rows"] == 40000
    report = Path(last["report"]).read_text()
    assert "<svg" in report
    assert not re.search(r"""(src|href)=["']?https?:""", report), "the report must open offline"
    for sentence in ("Input-bound share", "Decisions of the agent", "of the way from chance", last["report"],
                     "order hash equal to the one-thread run", "--tuning shadow"):
        assert sentence in result.stderr
    told = re.findall(r"\n  ([A-D])\. At .*?(slow-transform=4|sent SIGKILL|cores=[0-9.]+)@?", result.stderr)
    assert [label for label, _ in told] == ["A", "B", "C", "D"], told
    assert [what.split("=")[0] for _, what in told] == ["slow-transform", "sent SIGKILL", "cores", "cores"]
    assert '<g class="mark occasion">' in Path(last["report_ingest"]).read_text()


def test_the_demo_never_empties_a_folder_that_is_not_its_own(tmp_path):
    (tmp_path / "precious").write_text("mine")
    result = subprocess.run([sys.executable, "-m", "dlrm.demo", "--out", tmp_path], capture_output=True, text=True,
                            timeout=60, check=False)
    assert result.returncode == 2
    assert "not made by the demo" in result.stderr
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.timeout(120)
def test_an_interrupt_leaves_nothing_running(tmp_path):
    """In the middle of the Spark step: the demo's own log says when that has begun."""
    process = subprocess.Popen([sys.executable, "-m", "dlrm.demo", "--out", tmp_path / "out", "--rows", "20000"],
                               stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                               env={**os.environ, "TMPDIR": str(tmp_path)})
    with process.stderr as lines:
        for line in lines:
            if "spark-submit" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 130
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive, alive
