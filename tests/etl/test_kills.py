"""A writer killed at any moment: readers see the version before, or the new one, whole."""

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.small_table import small_table
from sluice import FeatureTable

pytestmark = pytest.mark.slow

# Each writer is a fork, which imports nothing. It kills itself at a given call of a function, counted from the start or
# from its commit; told -1, it says how many calls there are, and how many of them from the commit on.
_WRITERS = """
import json, os, signal, sys
from benchmarks.small_table import small_table

def write(uri, moment, from_commit):
    calls = commits = 0
    def count(frame, event, argument):
        nonlocal calls, commits
        calls += 1
        if frame.f_code.co_name == "_commit" and event == "call":
            commits = calls
        if (calls - commits if from_commit else calls) == moment and (commits or not from_commit):
            os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(count)
    small_table(uri, rows=40, files=1, mode="overwrite", first=1000, splits={"train": 1.0})
    sys.setprofile(None)
    print(json.dumps([calls, calls - commits]), flush=True)

for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            write(*json.loads(line))
        finally:
            os._exit(0)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_30_moments_leaves_a_whole_version(tmp_path, repo):
    small_table(tmp_path / "t", rows=30, files=1, splits={"train": 1.0})
    with subprocess.Popen(
        [sys.executable, "-c", _WRITERS],
        cwd=repo,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writers:

        def write(number: int, moment: int, from_commit: bool) -> Path:
            place = tmp_path / str(number)
            shutil.copytree(tmp_path / "t", place)
            print(json.dumps([str(place), moment, from_commit]), file=writers.stdin, flush=True)
            return place

        write(0, -1, False)
        most, after = json.loads(writers.stdout.readline())
        assert json.loads(writers.stdout.readline()) == 0
        generator = random.Random(11)
        # How many calls there are depends on what was compiled before; so those about the commit are counted from it.
        moments = [(generator.randrange(1, most * 9 // 10), False) for _ in range(15)]
        moments += [(0, True), (after - 1, True)]
        moments += [(generator.randrange(1, min(60, after)), True) for _ in range(13)]
        seen = set()
        for number, (moment, from_commit) in enumerate(moments, 1):
            table = write(number, moment, from_commit)
            assert json.loads(writers.stdout.readline()) == -signal.SIGKILL
            table = FeatureTable.open(table)
            assert [p for p in table.check() if "orphan" not in p] == []
            assert (table.version, table.rows) in ((0, 30), (1, 40))
            seen.add(table.version)
    assert seen == {0, 1}  # both sides of the commit were met
