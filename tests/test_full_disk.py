"""A full disk, at each writer that is no Spark job: its message, what survives, and that nothing is left.

The kernel refuses to let files grow beyond a size (RLIMIT_FSIZE): writes come back short and then fail, as on a full
disk, wherever the tests run. The table's writers are in tests/etl, those of checkpoints in tests/dlrm."""

import json
import resource
import threading
from contextlib import closing, contextmanager

import pytest

from sluice import Errors
from sluice.agent.report import page
from sluice.agent.runtime.loader_options import LoaderOptions
from sluice.common.program import run
from sluice.dlrm.telemetry.journal import TrainingProgress
from tests.agent.fake import FakeStage
from tests.agent.test_knob_memory import FakeLoader
from tests.product import (
    Journal,
    KnobMemory,
    Quarantine,
    QuarantineError,
    RunError,
    RunFolder,
    read_lines,
    say,
)
from tests.raises import assert_names, raises


@contextmanager
def no_more_than(size: int):
    """No file can grow beyond so many bytes while it lasts."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(TrainingProgress, "say", lambda _self, text: lines.append(text))
    return lines


def metric(step: int) -> dict:
    return {"kind": "train", "step": step, "loss": 0.5, "samples_per_s": 10.0, "stall": 0.0}


@pytest.mark.parametrize("size", [3000, 12_000], ids=["curves", "metrics"])
def test_a_log_without_room_stops_no_training_and_holds_whole_lines(tmp_path, said, size):
    """The curves' file is the first to be full, or, where that was made before, the metrics'."""
    folder = RunFolder.create(tmp_path / "run", {"kind": "train"})
    with closing(Journal()) as journal:
        journal.open(folder)
        for step in range(50):
            journal.metric(metric(step))
        with no_more_than(size):
            trained = threading.Thread(
                target=lambda: [journal.metric(metric(step)) for step in range(50, 1000)],
                daemon=True,
            )  # the library's own writer would wait here for ever
            trained.start()
            trained.join(timeout=60)
        assert not trained.is_alive()
        journal.metric(metric(1000))  # there is room again
    assert len(said) == 1
    assert_names(said[0], "File too large", "training goes on")
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == sorted(set(steps))  # a shorter line may find room where a longer one did not
    assert (steps[:50], steps[-1]) == ([*range(50)], 1000)
    assert 50 < len(steps) < 1000


def test_a_report_without_room_costs_no_result(tmp_path, capsys):
    with RunFolder.create(tmp_path / "run", {"kind": "train"}) as folder:
        folder.metric(metric(1))
    with no_more_than(100):
        assert page.written(tmp_path / "run", say) is None
    assert_names(capsys.readouterr().err, "report", "File too large", "`sluice report")
    assert sorted(p.name for p in (tmp_path / "run").glob("report*")) == []
    assert page.write(tmp_path / "run").exists()


@pytest.mark.parametrize("size", [0, 10], ids=["lock", "config"])
def test_a_run_that_cannot_begin_to_write_is_refused(tmp_path, size):
    with (
        no_more_than(size),
        raises(RunError, tmp_path / "run", "File too large"),
    ):
        RunFolder.create(tmp_path / "run", {"kind": "train", "batch_size": 8192})
    assert not list((tmp_path / "run").glob("config*"))
    RunFolder.create(tmp_path / "run", {}).close()  # the same folder will do once there is room


def test_a_run_on_a_full_registry_is_a_line_for_each_record(tmp_path):
    """As a trainer has it: what it keeps there costs the record, and knobs to be saved cost their file."""
    lines: list[str] = []
    loader = FakeLoader([FakeStage(name="decode", cpu_s=0.004)], cores=2)
    options = LoaderOptions(
        registry=str(tmp_path / "registry"), save_knobs=str(tmp_path / "best.json")
    )
    memory = KnobMemory(loader, options, say=lines.append)
    memory.start()
    with no_more_than(0):
        loader.advance(5)
        memory.finish(policy="fixed")
    assert len(lines) == 2
    assert "the registry at" in lines[0]
    assert "the knobs cannot" in lines[1]


def test_lines_for_a_person_that_have_no_room_are_lost_and_the_program_goes_on(
    tmp_path, monkeypatch
):
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr("sys.stderr", log)
        progress = TrainingProgress(out=log)
        with no_more_than(0):
            say("lost")
            progress.say("lost")
    assert "lost" in (tmp_path / "log").read_text()  # once there is room, what waited is written


def test_a_program_without_room_ends_with_one_line(tmp_path, capsys):
    def writes(_argv: list[str]) -> None:
        with no_more_than(0):
            (tmp_path / "x").write_text("x")

    with pytest.raises(SystemExit) as ended:
        run(writes, argv=[])
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "failed: a file: cannot be written (File too large); make room there, then run it again\n"
    )


def test_rows_that_cannot_be_listed_stop_the_run(tmp_path):
    """A quarantined row that is listed nowhere would be lost silently."""
    books = Quarantine(Errors(on_error="quarantine", quarantine=tmp_path / "q.jsonl"))
    books.add(ValueError("bad"), stage="clean", group=("f", 0), rows=[1])
    with (
        no_more_than(300),
        raises(QuarantineError, "q.jsonl", "20 quarantined rows", "File too large"),
    ):
        books.add(ValueError("bad"), stage="clean", group=("f", 0), rows=range(2, 22))
    books.close()
    assert json.loads((tmp_path / "q.jsonl").read_text().splitlines()[0])["row"] == 1
