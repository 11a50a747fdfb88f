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


def test_a_bar_reaches_the_line_at_the_limit_and_an_arrow_beyond():
    assert race.bar(0.0, 1.0, 10) == "        │ "
    assert race.bar(0.5, 1.0, 10) == "████    │ "
    assert race.bar(1.0, 1.0, 10) == "████████│ "
    assert race.bar(9.0, 1.0, 10) == "████████│▶"
    assert race.bar(0.02, 1.0, 10) == "▏       │ "


def test_a_lane_tells_its_median_and_how_many_times_ours_is_as_fast():
    lane = race.Lane("tf.data", [1e6, 3e6, 2e6], [4.0, 2.0, 3.0], row_ns=[900.0, 100.0, 250.0])
    line = race.drawn(lane, 4e6, 100, {})
    assert line.startswith("tf.data ")
    assert line.endswith("2.00 M rows/s   0.50    0.25 s  ours ×3")
    assert "\033" not in line
    assert race.drawn(race.Lane("ours", [4e6], row_ns=[1.0]), 4e6, 100, race._COLOURS).startswith(
        "\033[1;32mours"
    )


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
    lanes = {"ours", race.PACKED, race.MAPPED}
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
