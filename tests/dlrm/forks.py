"""Programs forked from one process that has imported everything: that takes longer than most runs themselves. How a
person starts the trainer is in rig.py.

    python -m tests.dlrm.forks     a line of JSON on standard input begins one; its process ids and then its exit status
                                   are the answer
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import psutil

from tests import ports
from tests.dlrm.rig import ROOT, environment

LATE = (
    "sluice.dlrm.serve",
    "sluice.dlrm.session.session",
    "sluice.dlrm.training.assemble",
    "sluice.dlrm.follow.transplant",
    "sluice.dlrm.checkpoint.saving",
    "sluice.dlrm.telemetry.journal",
    "sluice.dlrm.evaluation.validation",
    "sluice.dlrm.session.trainer",
    "sluice.agent.report.page",
    "tensorboardX",
    "torch.distributed.optim",
    "torchrec.distributed.fbgemm_qcomm_codec",
)
"""The server, and what the trainer or one of its libraries imports only once it begins."""

_LIMIT_S = 180.0


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

    def run(
        self,
        module: str,
        *words: object,
        tmp: Path,
        ranks: int = 0,
        code: int | None = 0,
        cwd: Path = ROOT,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `-m module` to its end, with the test's environment and the temporary folder given. With `ranks`, it has
        as many processes, and the variables that torchrun sets. It must end with `code`. None: not with 0."""
        with self.start(module, *words, tmp=tmp, ranks=ranks, cwd=cwd) as started:
            process = started.ended()
        ended = process.returncode
        assert bool(ended) if code is None else ended == code, process.stderr[-3000:]
        return process

    train = partialmethod(run, "dlrm.train")

    @contextmanager
    def start(
        self, module: str, *words: object, tmp: Path, ranks: int = 0, cwd: Path = ROOT
    ) -> Iterator[Started]:
        """Starts what `run` runs. No other program starts before it has ended."""
        given = [str(word) for word in words]
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
        started = Started(given, tmp, self._process.stdout)
        asked = {
            "module": module,
            "words": given,
            "cwd": str(cwd),
            "out": str(started.out),
            "err": str(started.err),
            "environments": environments or [environment(tmp)],
        }
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        started.pids = json.loads(self._process.stdout.readline())
        try:
            yield started
        finally:
            if started.result is None:
                started.send(signal.SIGKILL)
                started.ended()


class Started:
    """A program that may run still."""

    def __init__(self, words: list[str], tmp: Path, answers: IO[str]) -> None:
        self.out, self.err = tmp / "forked.out", tmp / "forked.err"
        self.pids: list[int] = []
        self.result: subprocess.CompletedProcess[str] | None = None
        self._words, self._answers = words, answers
        self._seen: Counter[Path] = Counter()
        for path in (self.out, self.err):
            path.write_text("")

    def send(self, signum: int) -> None:
        """Sends a signal to each of its processes."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def preempted(self) -> subprocess.CompletedProcess[str]:
        """Sends SIGTERM, and waits for its end."""
        self.send(signal.SIGTERM)
        process = self.ended()
        assert process.returncode == 143, process.stderr[-3000:]
        return process

    def until(self, sign: str, path: Path | None = None) -> str:
        """Waits until a file, that of its errors if none is given, has the sign after what was waited for before.
        Returns the text from there on."""
        path, end = path or self.err, time.monotonic() + _LIMIT_S
        text = ""
        while sign not in text:
            assert time.monotonic() < end, f"no {sign!r}: {self.err.read_text()[-3000:]}"
            assert psutil.pid_exists(self.pids[0]), self.err.read_text()[-3000:]
            time.sleep(0.05)  # another process makes it true
            text = path.read_text()[self._seen[path] :] if path.exists() else ""
        self._seen[path] += text.index(sign) + len(sign)
        return text[text.index(sign) :]

    def ended(self) -> subprocess.CompletedProcess[str]:
        """Waits for its end. Its exit status is the first that is not 0."""
        code = json.loads(self._answers.readline())
        self.result = subprocess.CompletedProcess(
            self._words, code, self.out.read_text(), self.err.read_text()
        )
        self.out.unlink()
        self.err.unlink()
        return self.result


def forked(asked: dict[str, Any], variables: dict[str, str]) -> None:
    """Does what `python -m MODULE` does once it has started."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(asked["cwd"])
    sys.path[0] = asked["cwd"]
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

    for name in LATE:
        import_module(name)
    compat.install()
    gc.freeze()  # what is imported is never looked through again, which would take each fork two seconds at its end
    for line in sys.stdin:
        asked, pids = json.loads(line), []
        for variables in asked["environments"]:
            pids.append(os.fork())
            if not pids[-1]:
                forked(asked, variables)
                return
        print(json.dumps(pids), flush=True)
        print(await_all(pids), flush=True)


if __name__ == "__main__":
    main()
