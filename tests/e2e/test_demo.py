"""The demo with few rows: every step for real, and an interrupt in the middle of it."""

import os
import re
import signal
import subprocess
import sys
from html import escape
from pathlib import Path

import psutil
import pytest

from examples.demo.__main__ import FAULTS, main
from examples.demo.steps import step, torchrun
from sluice.agent.report.story import Story
from tests import processes
from tests.product import Run, UsageError
from tests.raises import assert_names, raises
from tests.run_program import last_json, run_program

pytestmark = pytest.mark.slow


@pytest.mark.timeout(400)
def test_the_demo_shows_its_training_tuned_and_each_figure_is_the_same_everywhere(tmp_path):
    """Its terminal, its last line, the run's page, its last event and `explain`."""
    result = run_program(
        "-m",
        "examples.demo",
        "--out",
        tmp_path / "out",
        "--rows",
        "50000",
        "--ranks",
        "1",
        timeout=390,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=True,
    )
    last = last_json(result)
    assert 0.5 < last["auc"] < last["bayes_auc"] < 1
    assert last["rows"] == 50_000
    report = Path(last["report"]).read_text()
    assert not re.search(r"""(src|href)=["']?https?:""", report), "the report must open offline"
    run = Run.read(Path(last["report"]).parent)
    end, story = run.of("end")[-1]["outcome"], Story.of(run)
    assert end["headline"] == last["headline"]
    assert end["stall_settled"] == last["stall_tuned"] == story.outcome.stall_settled
    for sentence in (last["headline"], *(incident["sentence"] for incident in end["incidents"])):
        assert result.stderr.count(sentence) == 2, "printed by the training and by the demo"
        assert escape(sentence) in report
        assert sentence in story.explanation
    assert [fault["fault"] for fault in run.of("fault")] == FAULTS.split(",")
    (killed,) = (incident for incident in end["incidents"] if "kill-worker" in incident["text"])
    assert re.search("(were|was) replaced", killed["noticed"])
    assert last["results"] == {
        incident["label"]: incident["result"] for incident in end["incidents"]
    }
    assert run.of("epoch")[0]["order_hash"] == last["order_hash"]
    asked, found = last["rows_per_s_cached"]
    assert found > asked
    losses = {line["step"]: line["loss"] for line in run.of("train")}
    one_worker = Run.read(Path(last["report_one_worker"]).parent).of("train")
    assert len(one_worker) >= 3
    assert all(losses[line["step"]] == line["loss"] for line in one_worker)
    assert_names(
        result.stderr,
        "spark-submit --properties-file spark-defaults.conf etl/job.py",
        "the same fingerprint",
        "One worker a stage",
        "The lookups again",
        last["report"],
        "--tuning shadow",
    )


def test_a_cluster_without_java_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("examples.demo.__main__.has_java", lambda: False)
    with raises(UsageError, "--cluster", "Java 17"):
        main(["--out", str(tmp_path / "out"), "--cluster"])
    assert not (tmp_path / "out").exists()


def test_each_host_of_a_cluster_starts_its_ranks_and_one_of_them_says_the_result(tmp_path):
    assert {"--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d"} < set(torchrun(2, 2))
    mark = tmp_path / "first"
    host = f"mkdir {mark} 2>/dev/null && echo '{{}}' || touch {mark}/second"
    assert step("two hosts", "sh", "-c", host, hosts=2)[0] == {}
    assert (mark / "second").exists()


def test_the_demo_never_empties_a_folder_that_is_not_its_own(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with raises(UsageError, str(tmp_path), "not made"):
        main(["--out", str(tmp_path)])
    assert (tmp_path / "precious").read_text() == "mine"


def begun(folder: Path, rows: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--out", folder / "out", "--rows", str(rows)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


@pytest.mark.timeout(300)
def test_who_asks_it_to_end_ends_what_it_started(tmp_path):
    with begun(tmp_path, 5_000_000) as process:
        try:
            while not (children := psutil.Process(process.pid).children(recursive=True)):
                assert process.poll() is None
        finally:
            process.terminate()
            assert process.wait(60) == 130
    assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.timeout(300)
def test_an_interrupt_leaves_nothing_running(tmp_path):
    """In the middle of the Spark step: the job's own log says when that has begun."""
    with begun(tmp_path, 20_000) as process:
        try:
            for line in process.stderr:
                if line.startswith("starting Spark"):
                    break
            children = psutil.Process(process.pid).children(recursive=True)
            assert any("spark.deploy" in processes.command_line(child) for child in children)
        finally:
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(60) == 130
    assert not psutil.wait_procs(children, timeout=60)[1]
