"""Every command of the README works: only sizes and places are made small."""

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.dlrm.rig import SMALL_MODEL
from tests.etl.tables import write_rows

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
BY_CI = ("make setup", "make demo", "make test")  # each has a test of its own, but for the last one
SUBMIT = "spark-submit --properties-file spark-defaults.conf etl/job.py "
"""How the demo's test starts Spark. Here the local engine takes the same options."""
TORCHRUN = "torchrun --nproc-per-node=2 -m "


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def commands() -> list[str]:
    lines = re.sub(r"\\\n *", "", "\n".join(blocks("sh"))).splitlines()
    return [
        line.split("  #")[0].strip()
        for line in lines
        if line.strip() and not line.startswith(("#", ". .venv", *BY_CI))
    ]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The working folder, with the checkout's specs and files of clicks."""
    (tmp_path / "features").symlink_to(ROOT / "features")
    (tmp_path / "clicks").mkdir()
    ids = np.arange(3000)
    write_rows(
        tmp_path / "clicks" / "part-0.parquet",
        clicked=(ids % 2).astype(np.int8),
        price=(ids / 7).astype(np.float32),
        item=ids % 50,
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(command: str) -> list[str]:
    """The README's command with few rows, few seconds, and a small model."""
    words = shlex.split(command)
    for flag, value in (("--rows", "12000"), ("--seconds", "2"), ("--batch-size", "512")):
        if flag in words:
            words[words.index(flag) + 1] = value
    if "sluice.dlrm.train" in words:
        words += ["--batch-size", "512", *SMALL_MODEL]
    return words


@pytest.mark.timeout(600)
def test_every_command_of_the_readme_works(place, forks):
    where, done = {"tmp": place, "cwd": place}, 0
    ahead = iter(commands())
    for command in ahead:
        if command.endswith(" &"):  # a server, and then who asks it
            words = small(command.replace("8000", "0"))[:-1]
            with forks.start(*words, **where) as server:
                port = server.until("serving").splitlines()[0].rpartition(":")[2]
                asked = shlex.split(next(ahead).replace("8000", port))
                answer = subprocess.run(asked, capture_output=True, check=True, timeout=60).stdout
                server.send(signal.SIGTERM)
                out = server.ended().stdout
            assert len(json.loads(answer)["probabilities"]) == 2
            assert json.loads(out.splitlines()[-1])["statuses"] == {"200": 1}
            continue
        ranks = 2 if command.startswith(TORCHRUN) else 0
        words = small(command.replace(SUBMIT, "sluice etl ").removeprefix(TORCHRUN))
        result = forks.run(*words, **where, ranks=ranks)
        assert json.loads(result.stdout.splitlines()[-1]), command
        done += 1
    assert done >= 9


def test_every_python_example_works(place, capsys):
    """Also those for who comes from another loader."""
    examples = [*blocks("python"), *blocks("python", "docs/coming-from.md")]
    assert len(examples) == 6
    for example in examples:
        exec(compile(example.replace("8192", "512"), "example", "exec"), {"__name__": "example"})
    assert len(capsys.readouterr().out.splitlines()) == len(examples)
    assert (place / "run-loader" / "report.html").exists()
