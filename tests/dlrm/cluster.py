"""Training on several hosts of `tests.hosts`, by the command of docs/launch.md: `Cluster`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.dlrm import epochs
from tests.dlrm.rig import ROOT, environment
from tests.dlrm.test_launch_page import torchrun_commands
from tests.hosts import Hosts

_LIMIT_S = 180.0


class Cluster:
    """Runs the page's command on hosts."""

    def __init__(self, hosts: Hosts, folder: Path, *more: object) -> None:
        """`more` are options of training."""
        self._hosts, self._folder, self._more = hosts, folder, more

    def agent(self, host: int, count: int, what: str = "none", name: str = "") -> Agent:
        """Starts torchrun, as elastic_agent.py has it, on one of `count` hosts. `what` happens to its rank."""
        (words,) = [
            words for words in torchrun_commands() if "--rdzv-endpoint=HOST0:29400" in words
        ]
        here = {
            "--nnodes=4": f"--nnodes={count}",
            "--nproc-per-node=8": "--nproc-per-node=1",
            "--rdzv-endpoint=HOST0:29400": "--rdzv-endpoint=host0:29400",
            "sluice.dlrm.train": "tests.dlrm.elastic_ranks",
            "/shared/table": self._folder / "table",
            "/shared/run": self._folder / "run",
        }
        assert set(here) <= set(words)
        agent = (sys.executable, "-m", "tests.dlrm.elastic_agent")
        words = [*agent, *(here.get(word, word) for word in words[1:])]
        module = words.index("tests.dlrm.elastic_ranks") + 1
        words[module:module] = [self._folder / "log", what]
        name = name or f"host{host}"
        env = {**environment(self._folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        more = (*epochs.TRAIN, *self._more)
        process = self._hosts.start(host, [*words, *more], name, cwd=ROOT, env=env)
        return Agent(process, self._folder / name)


class Agent:
    """A torchrun on a host."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self._process, self._path = process, path

    @property
    def said(self) -> str:
        return self._path.with_suffix(".err").read_text()

    def wait(self) -> int:
        """Waits for its end, and returns its exit status."""
        return self._process.wait(_LIMIT_S)

    def end(self, code: int = 0) -> None:
        """Waits for its end with this exit status."""
        assert self.wait() == code, self.said[-3000:]

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits for something that it causes."""
        end = time.monotonic() + _LIMIT_S
        while not holds():
            assert self._process.poll() is None, self.said[-3000:]
            assert time.monotonic() < end, self.said[-3000:]
            time.sleep(0.05)


def ended(agents: Sequence[Agent]) -> None:
    for agent in agents:
        agent.end()
