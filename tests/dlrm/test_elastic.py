"""A rank is killed: all start anew and go on, with no row lost or repeated in the epoch. Lost hosts: test_hosts.py."""

from __future__ import annotations

import pytest

from tests.dlrm import epochs
from tests.dlrm.rig import last_json, launch

pytestmark = pytest.mark.slow


def test_after_a_killed_rank_every_row_of_the_epoch_was_trained_once(tmp_path):
    table = epochs.write(tmp_path)
    run = ("--data", tmp_path / "table", "--run-dir", tmp_path / "run", *epochs.TRAIN)
    done = launch(
        2, "tests.dlrm.elastic_ranks", tmp_path / "log", "kill@17", *run, tmp=tmp_path, restarts=1
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert last_json(done)["steps"] == epochs.STEPS
    assert epochs.starts(table, tmp_path) == [0, 10]
