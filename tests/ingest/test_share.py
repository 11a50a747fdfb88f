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


@pytest.mark.parametrize(
    ("folder", "limit", "text"),
    [("", "cpu.max", "50000 100000"), ("cpu", "cpu.cfs_quota_us", "50000")],
)
def test_a_group_of_its_own_has_the_quota(tmp_path, monkeypatch, folder, limit, text):
    """On a made-up tree: the kernel fills a new group with its files, here mkdir does."""
    make = os.mkdir

    def filled(path, *more, **how):
        make(path, *more, **how)
        if "sluice-" in str(path) and str(path).startswith(str(tmp_path / folder)):
            open(f"{path}/{limit}", "w").close()

    (tmp_path / "cpu").mkdir()
    monkeypatch.setattr(os, "mkdir", filled)
    if folder:
        (tmp_path / f"sluice-{os.getpid()}").touch()  # version 2 is not there
    share = CoreShare(tmp_path)
    assert_names(share.set(0.5), "quota", "0.5 cores")
    group = tmp_path / folder / f"sluice-{os.getpid()}"
    assert (group / limit).read_text() == text
    family = set(
        map(str, Machine().tree())
    )  # of which a made-up file keeps the last that was written
    assert (group / "cgroup.procs").read_text() in family
    share.set(2)
    assert (group / limit).read_text().startswith("200000")
    assert os.sched_getaffinity(0) == CORES
    share.restore()
    assert (tmp_path / folder / "cgroup.procs").read_text() in family
