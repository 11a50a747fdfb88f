"""Errors, stores and faults on purpose in the trainer: as its command line asks for them."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.small_table import small_table
from sluice import FeatureTable
from sluice.common.settings import make
from sluice.dlrm import options
from sluice.dlrm.training import loaders
from sluice.ingest.options import RunOptions
from tests.dlrm.rig import logged, run_words
from tests.product import Config, KnobMemory, read_lines
from tests.run_program import last_json

pytestmark = pytest.mark.slow

GROUP = 1


def said(*words):
    return options.parse([*["--run-dir", "r", "--data", "t"], *words])


def test_everything_asked_for_is_kept_and_faults_are_not_repeated_by_a_resume():
    config = make(
        Config,
        said(
            *[
                "--on-error",
                "quarantine",
                "--max-quarantined",
                "7",
                "--max-quarantined-rate",
                "0.5",
            ],
            *["--inject", "corrupt@part-0"],
        ),
        version=0,
    )
    assert config.conditions == RunOptions(
        on_error="quarantine",
        max_quarantined=7,
        max_quarantined_rate=0.5,
        inject="corrupt@part-0",
    )
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    again = options.resumed(config.to_dict(), said("--max-quarantined", "8")).conditions
    assert (again.on_error, again.max_quarantined, again.inject) == ("quarantine", 8, "")


def damaged(folder: Path) -> Path:
    """A table of which one row group of the train split has a flipped bit."""
    table = small_table(folder / "table", rows=6400, values=50, files=2, row_group_rows=512)
    victim = Path(table.files_of("train")[0].path)
    column = pq.read_metadata(victim).row_group(GROUP).column(5)
    data = bytearray(victim.read_bytes())
    data[column.data_page_offset + column.total_compressed_size * 3 // 4] ^= 4
    victim.write_bytes(data)
    return victim


def test_rows_set_aside_leave_two_ranks_in_step(tmp_path, forks):
    """One row group cannot be read, by whichever rank: both take all their steps, and the run ends."""
    victim = damaged(tmp_path)
    words = run_words(
        tmp_path,
        "--batch-size 256 --log-every 1 --on-error quarantine --max-quarantined-rate 1",
        "--inject stall-store=0.05s@0s,kill-worker@0s --knobs decode=2 --tuning fixed",
        f"--registry {tmp_path}/registry --save-knobs {tmp_path}/best.json",
    )
    process = forks.train(*words, tmp=tmp_path, ranks=2)
    last = last_json(process)
    assert last["steps"] == 5120 // 256
    lines = [
        line
        for path in (tmp_path / "run").glob("quarantine.rank*.jsonl")
        for line in read_lines(path)
    ]
    assert {(x["file"], x["row_group"]) for x in lines} == {(str(victim), GROUP)}
    assert last["rows_set_aside"] == len(lines) >= 512
    assert last["input"]["faults"]["happened"] == ["stall-store=0.05s@0s"]
    assert last["input"]["faults"]["missed"] == ["kill-worker=1@0s"]
    assert len(logged(tmp_path / "run", "fault")) == 1
    assert "needs at least" in process.stderr
    assert '"decode": 2' in (tmp_path / "best.json").read_text()
    table = FeatureTable.open(tmp_path / "table")
    config = Config(
        data=table.uri,
        version=0,
        batch_size=256,
        ranks=2,
        registry=str(tmp_path / "registry"),
        streams=4,
        window_rows=90,
    )
    with loaders.training(
        config, table, rank=1, local_ranks=2, conditions=loaders.conditions(config, tmp_path, 1)
    ) as loader:
        assert (loader.plan.streams, loader.plan.window_rows) == (4, 90)
        assert KnobMemory(loader, config, say=print, ranks=2).start()
        # Here the next run of two ranks on this machine begins.
        assert loader.knobs.workers["decode"] == 2
