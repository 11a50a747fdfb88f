"""A writer killed at any moment: readers see the version before, or the new one, whole."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sluice.etl.synth.small_table import small_table
from sluice.etl.table.table import FeatureTable

pytestmark = pytest.mark.slow

# Kills itself at a given call of a function, counted from the start or from its commit; told -1, it says how many calls
# there are, and how many of them from the commit on.
_WRITER = """
import os, signal, sys
from sluice.etl.synth.small_table import small_table
uri, moment, from_commit = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "commit"
calls = commits = 0
def count(frame, event, argument):
    global calls, commits
    calls += 1
    if frame.f_code.co_name == "_commit" and event == "call":
        commits = calls
    if (calls - commits if from_commit else calls) == moment and (commits or not from_commit):
        os.kill(os.getpid(), signal.SIGKILL)
sys.setprofile(count)
small_table(uri, rows=40, files=1, mode="overwrite", first=1000, splits={"train": 1.0})
sys.setprofile(None)
print(calls, calls - commits)
"""


@pytest.mark.slow
def test_a_writer_killed_at_30_moments_leaves_a_whole_version(tmp_path, repo):
    small_table(tmp_path / "t", rows=30, files=1, splits={"train": 1.0})

    def write(number: int, moment: int, begin: str) -> tuple[int, str, Path]:
        place = tmp_path / str(number)
        shutil.copytree(tmp_path / "t", place)
        done = subprocess.run([sys.executable, "-c", _WRITER, place, str(moment), begin], cwd=repo,
                              capture_output=True, text=True, timeout=150, check=False)
        return done.returncode, done.stdout, place

    code, said, _ = write(0, -1, "start")
    assert code == 0
    most, after = map(int, said.split())
    generator = random.Random(11)
    # How many calls there are depends on what was compiled before; so those about the commit are counted from it.
    moments = [(generator.randrange(1, most * 9 // 10), "start") for _ in range(15)]
    moments += [(0, "commit"), (after - 1, "commit")]
    moments += [(generator.randrange(1, min(60, after)), "commit") for _ in range(13)]
    with ThreadPoolExecutor(2) as pool:
        tries = list(pool.map(write, range(1, 31), *zip(*moments, strict=True)))
    seen = set()
    for code, _, place in tries:
        assert code == -signal.SIGKILL
        table = FeatureTable.open(place)
        assert [p for p in table.check() if "orphan" not in p] == []
        assert (table.version, table.rows) in ((0, 30), (1, 40))
        seen.add(table.version)
    assert seen == {0, 1}  # both sides of the commit were met
