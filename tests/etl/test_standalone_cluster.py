"""A cluster's processes end with it, and with whoever started it: seen with a script in Spark's place."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from examples.demo.standalone_cluster import StandaloneCluster
from tests.raises import raises

# A process of Spark's starts others; these say where they are before they are up, and stay.
_SPARK = """#!/bin/sh
sleep 600 &
echo $! >> "$PWD/children"
case "$1" in
*.Worker) echo "Successfully registered" ;;
*) echo ALIVE ;;
esac
sleep 600
"""
# It looks up every now and then: an interrupt just before a read that blocks is seen when that returns.
_OWNER = """
import select, signal, sys
from pathlib import Path
from tests.etl.test_standalone_cluster import of_scripts
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests' shell may ignore it
with of_scripts(Path(sys.argv[1])) as cluster:
    cluster.add_worker()
    print("up", flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
"""


def of_scripts(place: Path) -> StandaloneCluster:
    script = place / "home" / "bin" / "spark-class"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_SPARK)
    script.chmod(0o755)
    cluster = StandaloneCluster(place)
    cluster._home = place / "home"
    return cluster


def children(place: Path) -> list[psutil.Process]:
    return [psutil.Process(int(line)) for line in (place / "children").read_text().split()]


def test_all_that_was_started_ends_with_the_block(tmp_path):
    with of_scripts(tmp_path) as cluster:
        log = cluster.add_worker(memory="2g")
        started = children(tmp_path)
        assert len(started) == 2
        (tmp_path / "local").mkdir()
    assert "registered" in log.read_text()
    assert not psutil.wait_procs(started, timeout=60)[1]
    assert not (tmp_path / "local").exists()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_whoever_started_it_however_that_ends(tmp_path, repo, signum):
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, tmp_path],
        cwd=repo,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdout.readline() == "up\n"
        started = children(tmp_path)
        owner.send_signal(signum)
        owner.wait(60)
    assert not psutil.wait_procs(started, timeout=60)[1]


def test_one_that_does_not_come_up_says_what_it_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "_SPARK", "#!/bin/sh\necho no such luck\nexit 3\n")
    with (
        raises(RuntimeError, "Master", "'ALIVE'", "no such luck"),
        of_scripts(tmp_path),
    ):
        pass
