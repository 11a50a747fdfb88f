"""The loader's benchmarks: what they draw, how they take turns, and what their figures mean; not the figures."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from benchmarks import race
from benchmarks.peers.peer import Peer, PeerError
from benchmarks.peers.serve import Job
from sluice.common.errors import UsageError
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow

JOB = Job(("a.parquet",), ("I1", "label"), ("C1",), 64, "here")
PEER = """
    import sys
    from benchmarks.peers.serve import serve

    def arms(job, prepared):
        prepared.bytes = job.batch_size
        print("noise of a library")

        def batches(rows):
            while True:
                yield rows

        def failing():
            yield 1
            raise ValueError("no such column")

        return {"fast": lambda: batches(1000), "slow": lambda: batches(10), "broken": failing}

    serve(arms)
"""


def test_peers_are_asked_for_by_name():
    assert [kind.name for kind in race.peers_of(False, ())] == ["torch DataLoader by hand"]
    with raises(UsageError, "'tf.dta'", "'tf.data'"):
        race.peers_of(False, ["tf.dta"])


def test_a_peer_in_its_process_answers_and_says_what_went_wrong(tmp_path):
    program = tmp_path / "peer.py"
    program.write_text(textwrap.dedent(PEER))
    peer = Peer([sys.executable, str(program)], JOB)
    try:
        assert peer.arms == ["fast", "slow", "broken"]
        assert peer.prepared_bytes == 64
        (fast, row_ns), (slow, _) = peer.turn("fast", 0.1), peer.turn("slow", 0.01)
        assert fast > slow > 0
        assert 0 < row_ns < 1e9
        with raises(PeerError, "ValueError: no such column"):
            peer.turn("broken", 0.01)
        assert peer.turn("slow", 0.01)[0] > 0  # it goes on
    finally:
        peer.close()
    program.write_text("raise SystemExit('there is no torch')")
    with raises(PeerError, "it ended", "there is no torch"):
        Peer([sys.executable, str(program)], JOB)


def test_the_race_is_run_and_drawn(capsys, monkeypatch):
    broken = race.Kind("broken", "no_such_module", "")
    monkeypatch.setattr(race, "peers_of", lambda full, only: [broken])
    found = race.main(["--rows", "65536", "--seconds", "1e-9", "--rounds", "1"])
    lanes = {"ours", race.MAPPED}
    assert (
        json.loads(json.dumps(found))["rows_per_s"].keys()
        == found["core_s_per_million"].keys()
        == lanes
    )
    assert found["times"].keys() == lanes - {"ours"}
    assert min(found["core_s_per_million"].values()) > 0
    assert_names(
        capsys.readouterr().err, "medians", "benchmarks.peers.no_such_module", race.MAPPED, "10 MB"
    )
    with raises(UsageError, "--rows", 65536):
        race.main(["--rows", "100"])
