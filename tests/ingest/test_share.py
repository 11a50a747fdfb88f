"""A share of the cores: by a control group where one can be made, by affinity otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from sluice.ingest.faults.core_limit import CoreShare
from sluice.ingest.machine import Machine
from tests.raises import assert_names

CORES = os.sched_getaffinity(0)
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="takes two cores")


@needs_two
def test_all_threads_and_children_are_pinned_and_let_go_again(tmp_path):
    share, over = CoreShare(tmp_path), threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        before = Machine().cores()
        assert_names(share.set(0.5), "1 core", f"{before:g}")
        assert Machine().cores() == 1.0
        everywhere = (os.getpid(), thread.native_id, child.pid)
        assert [len(os.sched_getaffinity(n)) for n in everywhere] == [1, 1, 1]
        share.set(2)
        assert Machine().cores() == 2.0
    finally:
        share.restore()
        over.set()
        thread.join()
        child.communicate(b"\n")
    assert os.sched_getaffinity(0) == CORES
    assert list(tmp_path.iterdir()) == []
