"""Training programs that tests only need the end of, each forked from one process that has imported everything: that
takes longer than such a run itself. How a person starts the trainer is in rig.py.

    python -m tests.dlrm.forks     a line of JSON on standard input begins one; its exit status is the answer
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

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

    def train(self, *words: object, tmp: Path) -> subprocess.CompletedProcess[str]:
        """Trains in one rank to the end, with the test's environment and the temporary folder given."""
        given = [str(word) for word in words]
        out, err = tmp / "forked.out", tmp / "forked.err"
        print(
            json.dumps(
                {"words": given, "out": str(out), "err": str(err), "environment": environment(tmp)}
            ),
            file=self._process.stdin,
            flush=True,
        )
        code = json.loads(self._process.stdout.readline())
        found = subprocess.CompletedProcess(given, code, out.read_text(), err.read_text())
        out.unlink()
        err.unlink()
        return found


def forked(asked: dict[str, Any]) -> NoReturn:
    """What `python -m dlrm.train` does once it has started."""
    from sluice.common.program import run
    from sluice.dlrm import train

    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None
    for number, name, how in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["out"], os.O_WRONLY | os.O_CREAT),
        (2, asked["err"], os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(name, how, 0o666), number)
    run(train.main, argv=asked["words"], at_once=True)


def main() -> None:
    from sluice.ingest.read.petastorm import compat

    for name in _LATE:
        import_module(name)
    compat.install()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            forked(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
