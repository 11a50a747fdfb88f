"""The trainer's program as a user has it: under torchrun and alone, broken off, resumed, evaluated, and misused."""

import json
import re
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.small_table import small_table
from sluice import FeatureTable
from tests.dlrm.hostile_table import ended
from tests.dlrm.rig import launch, logged, losses, run_words
from tests.product import Run, RunFolder, TableStore, latest, read_lines, vacuum
from tests.raises import MISTAKES, assert_names
from tests.run_program import last_json

pytestmark = pytest.mark.slow

ROWS, BATCH = 6400, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, and what two ranks made of it in two epochs."""
    path = tmp_path_factory.mktemp("train")
    _table(path)
    (path / "sharding.json").write_text(json.dumps({"C1": "row", "C2": "row"}))
    process = launch(2, "dlrm.train", *_words(path, "two", "--epochs 2"), tmp=path)
    assert process.returncode == 0, process.stderr[-3000:]
    (path / "two.json").write_text(json.dumps(last_json(process)))
    (path / "two.err").write_text(process.stderr)
    return path


def _table(folder: Path) -> FeatureTable:
    return small_table(folder / "table", rows=ROWS, values=50, files=2, row_group_rows=512)


def vacuumed(table: FeatureTable):
    """Removes all versions but the newest, unless they are pinned."""
    return vacuum(TableStore(table.uri), keep=1, now=time.time() + 1, grace_s=0)


def _words(folder: Path, run: str | Path, *more: object) -> list[object]:
    settings = f"--batch-size {BATCH} --log-every 1 --sharding {folder}/sharding.json"
    return run_words(folder, settings, *more, run=run)


def result(folder: Path) -> dict:
    """The last line of the run on two ranks."""
    return json.loads((folder / "two.json").read_text())


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The error of a command line that the trainer refuses as wrong usage, in one line."""
    from sluice.dlrm.train import main

    code, (out, err) = ended(main, *words), capsys.readouterr()
    assert (code, err.count("\n")) == (2, 1)
    return json.loads(out)["error"]


def spoil(path: str, column: str, *, row: int, value: float) -> None:
    """Writes a table's file again, if shorter filled up to the same length, with one wrong value."""
    size = Path(path).stat().st_size
    rows = pq.read_table(path, partitioning=None)
    index = rows.schema.get_field_index(column)
    values = rows[column].to_pylist()
    values[row] = value
    rows = rows.set_column(
        index, rows.schema.field(index), pa.array(values, rows.schema.field(index).type)
    )
    pq.write_table(
        rows,
        path,
        row_group_size=512,
        write_statistics=False,
        compression="lz4",
        use_dictionary=False,
        write_page_checksum=True,
    )
    data = Path(path).read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    Path(path).write_bytes(data[:footer] + bytes(max(0, size - len(data))) + data[footer:])


def test_the_last_line_says_what_came_of_it(folder):
    last = result(folder)
    assert last["rows"] == ROWS // 10
    assert last["split"] == "test"
    assert 0.5 < last["auc"] < 1
    assert last["ranks"] == 2
    assert last["plan"]["C1"] == ["row", 0, 1]
    assert last["plan"]["C3"][0] == "table"
    assert 0 <= last["stall_fraction"] < 1
    assert last["samples_per_s"] > 0
    assert last["peak_bytes"] > 2**20
    assert last["rows_trained"] == 2 * (ROWS * 8 // 10 // BATCH) * BATCH
    assert Path(last["report"]).read_text().lstrip().lower().startswith("<!doctype html")


def test_the_run_folder_tells_the_run(folder):
    run = folder / "two"
    events = read_lines(run / "events.jsonl")
    kinds = [e["kind"] for e in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("checkpoint") == kinds.count("epoch") == 2
    assert {p["kind"] for p in events[0]["plan"]} == {"row", "table"}
    warnings = [e["text"] for e in events if e["kind"] == "warning"]
    assert_names(warnings[0], "40 steps", "256 rows", "5,120")
    assert all(f"warning: {text}\n" in (folder / "two.err").read_text() for text in warnings)
    assert [(m["epoch"], m["split"]) for m in logged(run, "eval")] == [
        (1, "validation"),
        (2, "validation"),
        (2, "test"),
    ]
    assert json.loads((run / "config.json").read_text())["ranks"] == 2
    assert list((run / "tensorboard").glob("events.*"))
    assert losses(run)[-1] < losses(run)[0]


def test_the_report_shows_plan_optimiser_memory_curves_and_stalls(folder):
    text = Path(result(folder)["report"]).read_text()
    plan = text[text.index("Sharding plan") :]
    assert all(f">{name}<" in plan for name in ("C1", "C26", "row", "table"))
    for words in (
        "the tables&#x27; optimiser keeps",
        "a rank holds gradients of at most",
        "largest over mean load of a rank",
        "Training loss",
        "AUC",
        "time that the trainer waits for input",
    ):
        assert words in text


def test_people_see_the_plan_and_the_result_and_no_library_noise(folder):
    text = (folder / "two.err").read_text()
    assert "largest over mean load of a rank" in text
    assert "parameters in dense layers" in text
    assert "test after 2 epochs: auc" in text
    assert "Warning" not in text


def test_the_same_seed_gives_the_same_result_and_other_knobs_change_nothing(folder, forks):
    """Nor do a policy that turns none, and --last where all batches are full."""
    words = _words(folder, "again", "--epochs 2 --tuning shadow --knobs decode=3 --last drop")
    process = forks.train(*words, tmp=folder, ranks=2)
    run = Run.read(folder / "again")
    assert "'tuning': 'shadow'" in str(run.config)
    assert losses(folder / "again") == losses(folder / "two")
    assert last_json(process)["auc"] == result(folder)["auc"]


def test_evaluating_the_checkpoint_gives_the_figures_of_training(folder):
    from sluice.dlrm import evaluate

    words = f"--run-dir {folder}/two --data {folder}/table --by C7 --predictions {folder}/rows"
    evaluated = evaluate.main(words.split())
    assert evaluated is not None
    trained, rows = result(folder), pq.read_table(folder / "rows")
    assert sum(of["rows"] for of in evaluated["by"]["C7"].values()) == rows.num_rows
    assert rows.column_names == ["label", "prediction", "weight", "C7"]
    assert evaluated["rows"] == trained["rows"]
    assert evaluated["auc"] == pytest.approx(trained["auc"], abs=1e-6)
    assert evaluated["logloss"] == pytest.approx(trained["logloss"], abs=1e-6)


def test_sigterm_saves_and_a_resumed_run_has_the_losses_of_an_unbroken_one(folder, forks):
    """One process, then two: also a resume on another number of ranks."""
    words = _words(folder, "broken", "--epochs 50")
    with forks.start("dlrm.train", *words, tmp=folder) as started:
        started.until("\nstep")
        process = started.preempted()
    stopped = last_json(process)
    assert stopped["stopped"]
    done = losses(folder / "broken")
    assert len(done) == stopped["steps"]
    assert stopped["steps"] < len(losses(folder / "two"))
    assert_names(process.stderr, "asked to stop", f"step {stopped['steps']}")
    go_on = f"--run-dir {folder}/broken --resume --epochs 2".split()
    resumed = forks.train(*go_on, tmp=folder, ranks=2)
    assert_names(resumed.stderr, f"from step {stopped['steps']}", f"epoch {stopped['epochs']} of 2")
    assert "asked to stop" not in resumed.stderr
    assert losses(folder / "broken") == pytest.approx(losses(folder / "two"), abs=2e-6)


def test_one_command_begins_a_run_and_goes_on_with_it_whatever_ended_it(folder, forks, tmp_path):
    """As a scheduler types it each time: in the folder of a run that was asked to stop before its first step, in one of
    a run that was killed, and in one whose run is over."""
    run = tmp_path / "run"
    words = _words(folder, run, "--resume")
    with RunFolder.create(run, {"kind": "train"}) as stopped:
        stopped.metric({"kind": "loader", "rows": 0, "rows_per_s": 0.0, "stall": 1.0})
    with forks.start("dlrm.train", *words, "--epochs", 1000, tmp=tmp_path) as started:
        started.until('"kind": "checkpoint"', run / "events.jsonl")
        started.send(signal.SIGKILL)
    saved = latest(run / "checkpoints")[1]
    assert saved.step > 0
    for _ in range(2):
        done = forks.train(*words, "--epochs", saved.epoch + 1, tmp=tmp_path)
        assert last_json(done)["steps"] == 20 * (saved.epoch + 1)
    assert_names(done.stderr, "nothing left to train", f"--epochs {saved.epoch + 1}")
    assert "going on from" not in done.stderr
    starts = [event["resumed_at"] for event in logged(run, "start")]
    assert starts == [0, saved.step, 20 * (saved.epoch + 1)]


def test_a_resume_without_a_checkpoint_or_data_and_in_a_folder_of_something_else_says_so(
    folder, tmp_path, capsys
):
    (tmp_path / "thesis.txt").write_text("mine")
    new = tmp_path / "new"
    for words, message in (
        (["--run-dir", new], "--data is missing"),
        (["--run-dir", new, "--resume"], "holds no checkpoint to go on from; give --data, too"),
        (_words(folder, tmp_path, "--resume"), "no run folder .it holds 'thesis.txt'"),
    ):
        assert re.search(message, refusal(capsys, *words))


def test_a_version_stays_while_it_is_trained_on_and_one_that_vanished_is_refused(
    tmp_path, forks, capsys
):
    """A newer version is published, and a vacuum that keeps nothing else comes: during the run, and after it. The run
    is asked to stop while its store answers no more, and saves all the same."""
    table = _table(tmp_path)
    more = "--sharding auto --epochs 1000 --inject stall-store=600s@50%"
    with forks.start("dlrm.train", *_words(tmp_path, "run", more), tmp=tmp_path) as started:
        started.until("\nstep")
        small_table(tmp_path / "table", rows=100, mode="overwrite", first=ROWS)
        kept = vacuumed(table)
        assert (kept.pinned, kept.files) == ((0,), ())
        started.until('"stall-store', tmp_path / "run" / "events.jsonl")
        process = started.preempted()
    stopped = last_json(process)
    assert stopped["stopped"]
    meta = latest(tmp_path / "run" / "checkpoints")[1]
    assert meta.step == stopped["steps"] == len(losses(tmp_path / "run"))
    assert set(meta.agent) == {"machine", "schema", "learned"}
    assert vacuumed(table).pinned == ()
    assert "vacuum" in refusal(capsys, "--run-dir", tmp_path / "run", "--resume")


def test_an_interrupt_ends_all_ranks(folder, forks, tmp_path):
    """The autouse check finds a rank that outlives its torchrun."""
    (tmp_path / "log").mkdir()
    ranks = ["--standalone", "--nproc-per-node=2", "-m", "tests.dlrm.elastic_ranks"]
    run = _words(folder, tmp_path / "run", "--epochs 1000")
    words = (*ranks, tmp_path / "log", "none", *run)
    with forks.start("tests.dlrm.elastic_agent", *words, tmp=tmp_path) as agent:
        agent.until("\nstep")
        agent.send(signal.SIGINT)
        assert agent.ended().returncode != 0


@pytest.mark.parametrize(
    ("words", "facts"),
    MISTAKES["training_check"],
)
def test_check_refuses_with_one_message_before_anything_starts(folder, capsys, words, facts):
    given = f"--data {folder}/table --run-dir {folder}/never --batch-size {BATCH} --check".split()
    error = refusal(capsys, *given, *(str(w).format(folder) for w in words))
    assert_names(error, *facts)
    assert not (folder / "never").exists()


def test_check_prints_the_plan_and_leaves_nothing(folder, capsys):
    from sluice.dlrm.train import main

    words = f"--data {folder}/table --run-dir {folder}/never --ranks 2 --check".split()
    plan = main([*words, "--batch-size", str(BATCH)])
    assert plan is not None
    assert (plan["ok"], plan["steps"]) == (True, 20)
    err = capsys.readouterr().err
    assert_names(err, "C26", "a rank needs at most", "for gradients\n")
    assert "--last drop" not in err
    assert not (folder / "never").exists()
    left = main([*words, *["--batch-size", "3000", "--last", "drop"]])
    assert left is not None
    assert (left["steps"], left["rows"]) == (1, 3000)
    (warning,) = left["warnings"]
    assert_names(warning, "1 steps", "3,000 rows", "5,120")
    err = capsys.readouterr().err
    assert f"warning: {warning}\n" in err
    assert_names(err, "--last drop", "2,120 of 5,120 rows")


def test_bad_data_on_one_rank_ends_all_and_the_first_rank_says_what_and_where(tmp_path, forks):
    """Without statistics in the files, only the rank that gets the row sees it, in the middle of training. (All kinds
    of bad data: test_guard.)"""
    table = _table(tmp_path)
    spoiled = table.files_of("train")[1].path
    spoil(spoiled, "C7", row=1000, value=999)
    process = forks.train(
        *f"--run-dir {tmp_path}/run --data {tmp_path}/table --batch-size {BATCH}".split(),
        tmp=tmp_path,
        ranks=2,
        code=None,
    )
    error = last_json(process)["error"]
    assert_names(error, "'C7'", "id 999", "53 rows", "'train'", spoiled, "row group 1")
    assert_names(error, f"row {1000 - 512}")
