"""What the tests say of processes that end while they look."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from tests import processes


def test_a_process_that_has_ended_is_not_alive_and_has_no_command_line():
    script = "import sys; print('here', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()  # until its program has begun, the kernel may show no command line yet
        seen = psutil.Process(child.pid)
        assert processes.alive(seen)
        assert "sys.stdin.read()" in processes.command_line(seen)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # from here on it is a zombie
        assert not processes.alive(seen)
        assert processes.command_line(seen) == ""
        assert child.wait(60) == 0
    assert (processes.command_line(seen), processes.name(seen)) == ("", "")
