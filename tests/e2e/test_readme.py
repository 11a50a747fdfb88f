"""Every command of the README works: only sizes and places are made small."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import processes
from tests.dlrm.rig import SMALL_MODEL
from tests.run_program import run_program

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
BY_CI = ("make setup", "make demo", "make test")  # each has a test of its own, but for the last one


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def commands() -> list[str]:
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [
        line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder that looks like the checkout, with files of clicks next to it."""
    here = tmp_path_factory.mktemp("readme")
    for name in (
        "sluice",
        "setup.py",
        "etl",
        "ingest",
        "agent",
        "dlrm",
        "features",
        "spark-defaults.conf",
    ):
        (here / name).symlink_to(ROOT / name)
    (here / "tmp").mkdir()
    (here / "clicks").mkdir()
    ids = np.arange(3000)
    pq.write_table(
        pa.table(
            {
                "clicked": (ids % 2).astype(np.int8),
                "price": (ids / 7).astype(np.float32),
                "item": ids % 50,
            }
        ),
        here / "clicks" / "part-0.parquet",
    )
    return here


def small(command: str) -> list[str]:
    """The README's command with few rows, few seconds, and a small model."""
    words = shlex.split(command)
    for flag, value in (("--rows", "12000"), ("--seconds", "2"), ("--batch-size", "512")):
        if flag in words:
            words[words.index(flag) + 1] = value
    if "sluice.dlrm.train" in words:
        words += ["--batch-size", "512", *SMALL_MODEL]
    return words


def started(words: list[str], place: Path, env: dict[str, str]) -> tuple[subprocess.Popen, str]:
    """A server that stays while the commands after it run, and its port."""
    server = subprocess.Popen(
        words, cwd=place, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for line in server.stderr:
        if line.startswith("serving"):
            return server, line.split()[-1].rpartition(":")[2]
    raise AssertionError(f"{words}: ended with {server.wait()}")


@pytest.mark.timeout(600)
def test_every_command_of_the_readme_works(place):
    done = []
    # What `. .venv/bin/activate` does.
    env = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "TMPDIR": str(place / "tmp"),  # torchrun and torch leave theirs there
    }
    port, servers = "0", []  # any that is free, and that one for whoever asks the server
    for command in commands():
        if command.startswith((*BY_CI, ". .venv")):
            continue
        words = [w.replace("8000", port) for w in small(command)]
        if words[-1] == "&":
            server, port = started(words[:-1], place, env)
            servers.append(server)
            continue
        result = subprocess.run(
            words, cwd=place, capture_output=True, text=True, timeout=240, check=False, env=env
        )
        assert result.returncode == 0, (
            f"{command}\n{result.stdout[-1000:]}\n{result.stderr[-4000:]}"
        )
        assert json.loads(result.stdout.strip().splitlines()[-1]), command
        if command.startswith("curl"):
            assert len(json.loads(result.stdout)["probabilities"]) == 2
        done.append(command)
    for server in servers:
        server.send_signal(signal.SIGTERM)
        out, _ = server.communicate(timeout=60)
        assert json.loads(out.strip().splitlines()[-1])["statuses"] == {"200": 1}
    assert len(done) >= 10
    assert not [
        p
        for p in psutil.Process().children(recursive=True)
        if processes.alive(p)
        and "dlrm" in processes.command_line(p)
        and "tests.dlrm.forks" not in processes.command_line(p)  # other tests of this process
    ]


def test_every_python_example_of_the_readme_works(place):
    for block in blocks("python"):
        result = run_program("-c", block.replace("8192", "512"), cwd=place)
        assert result.returncode == 0, result.stderr
        assert result.stdout
    assert (place / "run-loader" / "report.html").exists()


def test_every_example_for_those_who_come_from_another_loader_works(place):
    """In one process: each begins with its own import."""
    examples = blocks("python", "docs/coming-from.md")
    assert len(examples) == 5
    result = run_program("-c", "\n".join(examples), cwd=place)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(examples)
