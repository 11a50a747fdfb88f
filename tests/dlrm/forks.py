"""Training programs that tests only need the end of, each forked from one process that has imported everything: that
takes longer than such a run itself. How a person starts the trainer is in rig.py.

    python -m tests.dlrm.forks     a line of JSON on standard input begins one; its exit status is the answer
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from tests import ports
from tests.dlrm.rig import ROOT, environment

_LATE = (
    "sluice.dlrm.session.version_run",
    "sluice.dlrm.session.train",
    "sluice.dlrm.training.assemble",
    "sluice.dlrm.follow.transplant",
    "sluice.dlrm.checkpoint.save_load",
    "sluice.dlrm.telemetry.journal",
    "sluice.dlrm.evaluation.validation",
    "sluice.dlrm.training.trainer",
    "sluice.agent.report.page",
    "tensorboardX",
    "torch.distributed.optim",
    "torchrec.distributed.fbgemm_qcomm_codec",
)
"""What the trainer, or one of its libraries, imports only once it begins."""


class Forks:
    """A context; there is no other process of its own than the one that forks."""

    def __enter__(self) -> Forks:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dlrm.forks"],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def train(self, *words: object, tmp: Path, ranks: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run("dlrm.train", *words, tmp=tmp, ranks=ranks)

    def run(
        self, module: str, *words: object, tmp: Path, ranks: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Runs `-m module` to its end, with the test's environment and the temporary folder given. With `ranks`, it has
        as many processes, and the variables that torchrun sets."""
        given = [str(word) for word in words]
        out, err = tmp / "forked.out", tmp / "forked.err"
        met = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports.free()),
            "TORCHELASTIC_RUN_ID": "forks",
        }
        environments = [
            {**environment(tmp), **met, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            for rank in range(ranks)
        ]
        asked = {
            "module": module,
            "words": given,
            "out": str(out),
            "err": str(err),
            "environments": environments or [environment(tmp)],
        }
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        code = json.loads(self._process.stdout.readline())
        found = subprocess.CompletedProcess(given, code, out.read_text(), err.read_text())
        out.unlink()
        err.unlink()
        return found


def forked(asked: dict[str, Any], variables: dict[str, str]) -> None:
    """Does what `python -m MODULE` does once it has started."""
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    for number, name, how in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, asked["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        os.dup2(os.open(name, how, 0o666), number)
    sys.argv = [asked["module"], *asked["words"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


def await_all(pids: list[int]) -> int:
    """Returns the first exit status that is not 0. As torchrun does, ends the other ranks then."""
    code = 0
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        code = code or os.waitstatus_to_exitcode(status)
        if code:
            for other in pids:
                os.kill(other, signal.SIGTERM)
    return code


def main() -> None:
    from sluice.ingest.read.petastorm import compat

    for name in _LATE:
        import_module(name)
    compat.install()
    for line in sys.stdin:
        asked, pids = json.loads(line), []
        for variables in asked["environments"]:
            pids.append(os.fork())
            if not pids[-1]:
                forked(asked, variables)
                return
        print(await_all(pids), flush=True)


if __name__ == "__main__":
    main()
