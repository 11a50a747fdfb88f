"""The owner's side of one worker process: `Child` starts it, talks to it, watches it and ends it.

It is a new interpreter, never a fork, in its own process group, so Ctrl-C or a group's SIGTERM reaches the rank first.
A process descriptor shows at once when it is killed. It ends by itself when its owner dies (see
`sluice.ingest.process.child_main`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from typing import Any

from sluice.common import interpreter
from sluice.ingest.process import protocol

_LEAVE_S = 0.5
_STACK_S = 1.0
_PROGRAM = "sluice.ingest.process.child_main:main"
_SETTINGS = {
    # A worker has one thread. The pool's size decides how many cores a stage uses.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Memory of one item is kept for the next, because page faults cost more than most transforms.
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
}


def owner_of(cmdline: list[str]) -> int | None:
    """Returns the process id of the owner in a worker's command line. None: it is not a worker's command line."""
    arguments = interpreter.arguments_of(cmdline, _PROGRAM)
    return int(arguments[0]) if arguments else None


class Died(Exception):
    """A worker has ended. The message says how."""


class Overdue(Died):
    """A worker did not answer in time, and was killed. The message says how long it took, and its stack."""


class Child:
    """One process and its connections. Successive processes of a worker share only its region."""

    def __init__(self, function: str, region: int):
        """`region` is the descriptor of the shared memory."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, self._lifeline = os.pipe()
        self._trace = os.memfd_create("sluice-trace", os.MFD_CLOEXEC)
        self._read_trace = 0
        passed = (theirs.fileno(), lifeline, self._trace, region)
        try:
            self.process = subprocess.Popen(
                interpreter.command(_PROGRAM, os.getpid(), function, *passed),
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=2,
                process_group=0,
                env={**_SETTINGS, **os.environ},
            )
        except BaseException:
            for fd in (self._lifeline, self._trace):
                os.close(fd)
            self._sock.close()
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._pidfd = os.pidfd_open(self.process.pid)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._poll.register(self._pidfd, select.POLLIN)

    def send(self, message: dict[str, Any]) -> None:
        try:
            protocol.send(self._sock, message)
        except protocol.Gone:
            raise Died(self.reap()) from None

    def receive(self, limit_s: float | None) -> dict[str, Any]:
        """Receives the next message. Raises InvalidMessage if it is none, and `Died` if the process ends first. If it
        takes longer than `limit_s`, it is killed, and `Overdue` is raised."""
        # If this process was stopped for a while, the answer may be there although time is up. So it polls once more.
        for wait_ms in (None if limit_s is None else limit_s * 1000, 0):
            events = dict(self._poll.poll(wait_ms))
            # Messages are checked first, because one that was sent before the worker died counts.
            if self._sock.fileno() in events:
                try:
                    return protocol.receive(self._sock)
                except protocol.Gone:
                    raise Died(self.reap()) from None
            if events:
                raise Died(self.reap())
        stack = self.stack()
        self.kill()
        self.reap()
        raise Overdue(f"still at it after {limit_s:g} s, killed\n{stack}")

    def stack(self) -> str:
        """Returns the stacks of all its threads now. Empty if it does not answer, for instance because it is
        stopped."""
        before = os.fstat(self._trace).st_size
        signal.pidfd_send_signal(self._pidfd, signal.SIGUSR1)
        end, size = time.monotonic() + _STACK_S, before
        while time.monotonic() < end and not self._is_gone(0.02):
            last, size = size, os.fstat(self._trace).st_size
            if size == last > before:  # the trace has stopped growing
                break
        return self.trace()

    def trace(self) -> str:
        """Returns the stacks that its interpreter has written since the last call."""
        text = os.pread(self._trace, 2**16, self._read_trace)
        self._read_trace = os.fstat(self._trace).st_size
        return text.decode(errors="replace").strip()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def reap(self) -> str:
        """Waits for the process, which is ending, and returns how it ended."""
        code = self._end()
        how = (
            f"killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        return how + (
            " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
        )

    def close(self) -> None:
        """Waits a moment for the process to end by itself, then kills it."""
        self._sock.close()
        self._end()
        for fd in (self._lifeline, self._pidfd, self._trace):
            os.close(fd)

    def _is_gone(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def _end(self) -> int:
        """Ends the process and returns its exit code. Processes that it started end too: its group is killed before
        its id can be reused."""
        if self.process.returncode is None:
            self._is_gone(_LEAVE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()
