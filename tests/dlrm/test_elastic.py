"""A rank is killed: all start anew and go on, with no row lost or repeated in the epoch. Lost hosts: test_hosts.py."""

import pytest

from tests.dlrm import epochs
from tests.run_program import last_json

pytestmark = pytest.mark.slow


def test_after_a_killed_rank_every_row_of_the_epoch_was_trained_once(tmp_path, forks):
    table = epochs.write(tmp_path)
    run = (*f"--data {tmp_path}/table --run-dir {tmp_path}/run".split(), *epochs.TRAIN)
    agent = "--standalone --nproc-per-node=2 --max-restarts=1 -m tests.dlrm.elastic_ranks"
    words = (*agent.split(), tmp_path / "log", "kill@17", *run)
    done = forks.run("tests.dlrm.elastic_agent", *words, tmp=tmp_path)
    assert last_json(done)["steps"] == epochs.STEPS
    assert epochs.starts(table, tmp_path) == [0, 10]
