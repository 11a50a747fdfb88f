"""`python -m ingest bench` as a user runs it."""

import errno
import itertools
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from sluice.agent.report import page
from sluice.agent.report.format import percent
from sluice.agent.report.incidents import NO_STALL
from sluice.etl.spec.code_options import CodeOptions
from sluice.ingest.__main__ import main
from sluice.ingest.options import table_named
from sluice.tools.bench_run import consume
from tests.agent.run_figures import assert_same_figures
from tests.etl.tables import column, write_rows, write_spec
from tests.open_loader import load_epoch, open_loader
from tests.product import Run, RunFolder, Story, UsageError
from tests.raises import MISTAKES, assert_names, raises
from tests.run_program import run_program

pytestmark = pytest.mark.slow


def bench(words):
    done = run_program("-m", "ingest", *words.split())
    return done.returncode, done.stdout, done.stderr


def figures_of(words):
    """Runs a bench to its end, and returns its last line and what else it has said."""
    code, out, err = bench(words)
    assert code == 0, err
    return json.loads(out.splitlines()[-1]), err


def test_bench_ends_with_its_figures_and_leaves_a_run(table, tmp_path):
    last, err = figures_of(
        f"bench {table.uri} --batch-size 160 --seconds 1.5 --tuning auto --knobs decode=1"
        f" --store-latency-ms 5 --run-dir {tmp_path / 'run'}"
        " --transform tests.ingest.twin:halve --streams 16 --window-rows 300",
    )
    assert {
        "rows_per_s",
        "rows_per_s_settled",
        "stall_fraction",
        "stall_fraction_settled",
        "peak_bytes",
        "decisions",
        "knobs",
        "order_hash",
        "report",
    } <= last.keys()
    assert last["rows_per_s"] > 0
    assert last["peak_bytes"] > 2**20
    assert "halve" in last["knobs"]["workers"]
    assert "the trainer waited" in err.splitlines()[-1]
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["order_hash"] for event in events if event["kind"] == "end"] == [
        last["order_hash"]
    ]
    begun = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (begun["reader"], begun["streams"], begun["window_rows"]) == ("petastorm", 16, 300)
    expected, _ = load_epoch(table, batch_size=160, streams=16, window_rows=300, reader="arrow")
    assert last["order_hash"] == expected


def test_exactly_so_many_epochs_are_loaded_however_short_the_time(table):
    ticks = itertools.count()  # a second passes at each look
    with open_loader(table, batch_size=160, epochs=3, reader="arrow") as loader:
        figures = consume(loader, 1e-9, lambda: None, lambda: float(next(ticks)), epochs=3)
    with open_loader(table, batch_size=160, epochs=3, reader="arrow") as loader:
        expected = [(list(loader), loader.order_hash)[1] for _ in range(3)]
    assert (figures["order_hashes"], figures["order_hash"]) == (expected, expected[-1])
    assert figures["rows"] == 3 * 4000


def test_a_run_folder_without_room_costs_its_record_and_not_the_figures(
    table, tmp_path, monkeypatch, capsys
):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run" / "metrics.jsonl"))

    def fails(*_: object) -> None:
        raise full

    monkeypatch.setattr(RunFolder, "_write", fails)
    monkeypatch.setattr(page, "write", fails)
    figures = main(
        f"bench {table.uri} --batch-size 160 --epochs 1 --run-dir {tmp_path / 'run'}".split()
    )
    assert figures["rows"] > 0
    assert figures["report"] is None
    lines = capsys.readouterr().err.splitlines()
    metrics, report = (line for line in lines if "No space left on device" in line)
    assert_names(metrics, "metrics.jsonl")
    assert_names(report, "report")


def test_several_files_and_folders_are_one_table(table, tmp_path, capsys):
    """As the shell gives them in place of a pattern without quotes."""
    for folder, rows in (("a", 320), ("b", 160)):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / "c.parquet", y=[0, 1] * (rows // 2), x=np.arange(rows) / 2)
    figures = main(
        (
            f"bench {tmp_path}/a {tmp_path}/b/c.parquet --batch-size 80 --epochs 1"
            f" --run-dir {tmp_path}/run"
        ).split()
    )
    assert figures["rows"] == 480
    assert f"2 files from {tmp_path / 'a'} version" in capsys.readouterr().err


def test_a_spec_permits_functions_of_a_feature_table_and_describes_other_files(table, tmp_path):
    spec = tmp_path / "own.toml"
    spec.write_text(write_spec("label:int I1:float", column("I1", "dense", "fill")))
    code = CodeOptions(own_spec=str(spec))
    assert table_named([table.uri], None, code).fields == table.fields
    path = write_rows(tmp_path / "rows.parquet", label=[0, 1], I1=[0.5, 1.5], other=[1, 2])
    assert [field.name for field in table_named([str(path)], None, code).fields] == ["label", "I1"]


def test_faults_on_purpose_happen_and_change_no_order(table, tmp_path):
    last, err = figures_of(
        f"bench latency://{table.uri}?error_rate=0.3&latency_ms=1 --batch-size 160"
        " --seconds 1.5 --knobs shifted.backend=process,shifted=2 --on-error quarantine"
        " --transform tests.ingest.worker_functions:shifted --inject"
        " kill-worker@0.1s,kill-worker=all@0.6s,stall-store=0.1s@0.3s,kill-worker@1000s"
        f" --quarantine {tmp_path / 'aside'}",
    )
    assert last["faults"]["missed"] == ["kill-worker=1@1000s"]
    assert_names(err, "kill-worker=1@0.1s", "SIGKILL")
    assert last["worker_restarts"] >= 1
    assert last["store"]["retries"] > 0, last["store"]
    assert last["quarantined"]["rows_set_aside"] == 0
    assert last["memory"]["minimum"] <= last["memory"]["limit"]
    assert last["order_hash"] == load_epoch(table, batch_size=160, reader="arrow")[0]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two cores")
def test_a_dearer_transform_other_cores_and_a_killed_worker_are_reported_with_what_was_done(
    table, tmp_path
):
    """The trainer takes a batch in 20 ms, the transform 4 ms for one, and 40 later: one worker is not enough then."""
    knobs = "decode=1,shifted.backend=process,prefetch_bytes=1MiB"
    # The worker is killed first: later the tuner may have moved the transform out of its process.
    last, err = figures_of(
        f"bench {table.uri} --batch-size 400 --seconds 15 --step-ms 20 --tuning auto"
        " --reader arrow --transform tests.ingest.worker_functions:waits"
        f" --transform tests.ingest.worker_functions:shifted --knobs {knobs}"
        " --inject kill-worker@0.2s,slow-transform=10@3s,cores=1@10s,cores=2@12s"
        f" --run-dir {tmp_path / 'run'}",
    )
    assert last["faults"]["missed"] == []
    # A busy machine may change the costs of a row, too: such an incident has no fault.
    noticed = [incident for incident in last["incidents"] if "@" in incident["text"]]
    assert [incident["what"] for incident in noticed] == ["worker", "workload", "cores", "cores"]
    turned = [line for incident in last["incidents"] for line in incident["did"]]
    # On a busy machine, it may have got a second worker before it became dearer.
    moves = re.findall(r"waits (\d+) → (\d+)", " ".join(turned))
    assert any(int(after) > int(before) for before, after in moves), turned
    for event, cores in zip(noticed[2:], ("2 to 1", "1 to 2"), strict=True):
        assert event["noticed_s"] is not None
        assert_names(err, f"from {cores}")
    run = Run.read(tmp_path / "run")
    for fault, incident in zip(
        [e for e in run.of("fault") if "cores" in e["fault"]],
        [e for e in run.of("incident") if e["what"] == "cores"],
        strict=True,
    ):
        looks = sum(fault["at"] < m["at"] < incident["at"] for m in run.of("loader"))
        assert looks <= 1, "noticed at the second look after it, at the latest"
    assert last["worker_restarts"] >= 1
    text = Path(last["report"]).read_text()
    for change in noticed:
        assert f"{change['label']}. " in err
        assert f'<td class="o">{change["label"]}</td>' in text
    assert text.count('"tone":') >= 4
    assert_same_figures(tmp_path / "run", last, err)
    outcome = last["outcome"]
    assert outcome["decisions"] == last["decisions"]
    assert round(outcome["rows_per_s_settled"]) == last["rows_per_s_settled"]
    for waits in (text, Story.of(run).explanation):
        waited = rf"waited (for input )?{percent(outcome['stall_last'])}"
        assert re.search(waited, waits) or outcome["stall_last"] <= NO_STALL
    assert last["order_hash"] == load_epoch(table, batch_size=400, reader="arrow")[0]


@pytest.mark.parametrize(
    ("arguments", "facts"),
    MISTAKES["bench"],
)
def test_wrong_usage_is_an_error_for_people(table, arguments, facts):
    with raises(UsageError, *facts):
        main(f"bench --batch-size 80 {arguments}".format(table=table.uri).split())


def test_settled_figures_are_those_of_the_last_third(table):
    """The clock stands for the share of the time, and the loader's own figures for what happened in it."""
    ticks = iter([0.0, 0.0, 1.0, 2.0, 2.5, 3.0])
    with open_loader(table, batch_size=160, reader="arrow") as loader:
        seen = []
        stats = loader.stats

        def noted():
            seen.append((now := stats()).rows)
            return now

        loader.stats = noted
        figures = consume(loader, 3.0, lambda: None, lambda: next(ticks))
    # After the first batch, three batches came until two thirds of the time, and five until its end.
    assert seen == [2 * 160, 4 * 160]
    assert figures["rows"] == 5 * 160
    assert 0 <= figures["stall_fraction_settled"] <= 1
    assert figures["rows_per_s_settled"] > 0
    assert figures["order_hash"] is None


def test_knobs_go_from_run_to_run_by_file_and_by_registry(table, tmp_path, capsys):
    common = ["bench", table.uri, "--batch-size", "160", "--seconds", "0.3"]
    kept = f"--save-knobs {tmp_path}/k.json --registry {tmp_path}/registry"
    main([*common, *f"--knobs decode=3,prefetch_bytes=8MiB {kept}".split()])
    by_file = main([*common, "--knobs", f"{tmp_path}/k.json"])
    by_registry = main([*common, "--registry", f"file://{tmp_path}/registry"])
    assert "from the registry" in capsys.readouterr().err
    for figures in (by_file, by_registry):
        assert figures["knobs"]["workers"]["decode"] == 3
