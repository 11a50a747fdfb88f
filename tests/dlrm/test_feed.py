"""The trainer's loaders begin with the knobs that were asked for, by name or by file."""

from __future__ import annotations

from pathlib import Path

from benchmarks.small_table import small_table
from sluice.agent.runtime import knobs_file
from sluice.agent.runtime.knob_memory import KnobMemory
from sluice.dlrm.options import Config
from sluice.dlrm.training import loaders
from sluice.ingest.knobs import KnobError, Knobs
from tests.raises import raises


def _knobs(table, text):
    config = Config(
        data=table.uri, version=table.version, batch_size=64, knobs=text, reader="arrow"
    )
    with loaders.training(
        config,
        table,
        rank=0,
        local_ranks=1,
        conditions=loaders.conditions(config, Path(table.uri).parent, 0),
    ) as loader:
        KnobMemory(loader, config, say=print, ranks=1).start()
        return loader.knobs


def test_knobs_come_from_settings_or_a_file(tmp_path):
    table = small_table(tmp_path / "table", rows=2000, row_group_rows=256)
    path = knobs_file.save(tmp_path / "best.toml", Knobs(workers={"read": 5}, prefetch_bytes=2**21))
    by_file = _knobs(table, str(path))
    assert (by_file.workers["read"], by_file.prefetch_bytes) == (5, 2**21)
    assert _knobs(table, "read=3").workers["read"] == 3
    path.write_text("[workers]\nraed = 5\n")
    with raises(KnobError, "'raed'", "'read'"):
        _knobs(table, str(path))
