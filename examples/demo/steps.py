"""The steps of a demo: each is the command that a user would type, printed before it runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from sluice.common.errors import UsageError
from sluice.common.lines import say

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent
MARK = ".sluice-demo"  # only a folder with this mark is ever emptied
_ENDS = (signal.SIGINT, signal.SIGTERM)
# As `. .venv/bin/activate` does: spark-submit looks for its python3 on the path.
# One thread a rank: torchrun would set the same, with a banner about it.
ACTIVATED = {
    "OMP_NUM_THREADS": "1",
    **os.environ,
    "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
}


class StepFailed(RuntimeError):
    """A step of the demo ended badly; its own message is above."""


def begin(out: Path) -> None:
    """Empties the folder of an earlier demo, or makes it. From now on what the demo starts ends with it."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise UsageError(
            f"{out} is not empty and was not made by the demo; name another folder with --out"
        )
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARK).touch()


def step(
    title: str, *command: str | os.PathLike[str], hosts: int = 1
) -> tuple[dict[str, Any], float]:
    """Runs a command as a user would, its progress passed through; returns its JSON line and its seconds. It is started
    as often as there are `hosts`, one of which says that line."""
    words = _announced(title, command, hosts)
    began = time.monotonic()
    running: list[psutil.Popen] = []
    last, (read, write) = "", os.pipe()
    try:
        with _uninterrupted():
            for _ in range(hosts):
                running.append(_start(words, write))
            os.close(write)
        with open(read) as lines:
            for line in lines:
                if last:
                    # Only the last line is the result. The lines before it are for people.
                    say(last)
                last = line.rstrip()
        codes = [process.wait() for process in running]
    except BaseException:
        _end(running)
        raise
    if any(codes):
        raise StepFailed(f"{title}: ended with {max(codes, key=abs)} {last}")
    return json.loads(last), time.monotonic() - began


@contextmanager
def under_way(title: str, *command: str | os.PathLike[str]) -> Iterator[psutil.Popen]:
    """Runs torchrun while the context lasts, then asks its ranks to end (SIGTERM), and waits."""
    words, running = _announced(title, command), []
    try:
        with _uninterrupted():
            running.append(_start(words, subprocess.DEVNULL))
        yield running[0]
        running[0].suspend()  # It would print a traceback: ranks end with 143.
        ranks = running[0].children()
        for rank in ranks:
            rank.terminate()
        while any(rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
            time.sleep(0.05)
    finally:
        _end(running)


def torchrun(hosts: int, ranks: int) -> list[str]:
    """Returns the words that start so many ranks here, or those that each of so many hosts starts its ranks with: they
    meet at one of them."""
    if hosts == 1:
        return ["torchrun", f"--nproc-per-node={ranks}"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = f"127.0.0.1:{probe.getsockname()[1]}"
    return [
        "torchrun",
        f"--nnodes={hosts}",
        f"--nproc-per-node={ranks // hosts}",
        "--rdzv-backend=c10d",
        "--rdzv-id=demo",
        f"--rdzv-endpoint={meet}",
        "--local-addr=127.0.0.1",
    ]


def _announced(title: str, command: Sequence[str | os.PathLike[str]], hosts: int = 1) -> list[str]:
    words = [os.fspath(w) for w in command]
    say(
        f"\n── {title}\n$ {' '.join(_short(w) for w in words)}{'' if hosts == 1 else f'  # {hosts} times'}"
    )
    return words


def _start(words: Sequence[str], output: int) -> psutil.Popen:
    """Starts a command in a session of its own: an interrupt goes to all of its processes, and none outlives the
    demo."""
    return psutil.Popen(
        words, stdout=output, text=True, cwd=ROOT, env=ACTIVATED, start_new_session=True
    )


def _short(word: str) -> str:
    path = Path(word)
    for base in (ROOT, Path.cwd()):
        if path.is_absolute() and path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return word


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds an interrupt back until the context ends: a process that is just starting must be known first."""
    came: list[Any] = []
    answers = {ending: signal.signal(ending, lambda *got: came.append(got)) for ending in _ENDS}
    try:
        yield
    finally:
        for ending, answer in answers.items():
            signal.signal(ending, answer)
        if came and callable(answer := answers[came[0][0]]):
            answer(*came[0])


def _end(running: Sequence[psutil.Popen]) -> None:
    for signum in (signal.SIGINT, signal.SIGKILL):
        until = time.monotonic() + 1.0
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
        for process in running:
            with suppress(psutil.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
