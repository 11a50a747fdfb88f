"""Shows a run's page during the run, by another process: `shown`. The code of that process is in
`sluice.agent.report.live`, which a run does not load."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sluice.common import interpreter
from sluice.common.errors import UsageError
from sluice.common.settings import setting

HOST = "127.0.0.1"
_LEAVE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Where a run's page is shown while it grows."""

    title = "page"
    live: int | None = setting(
        None,
        "show the run's page while it lasts, on this port of 127.0.0.1 (0: any that is free)",
        metavar="PORT",
        least=0,
    )


class LiveError(UsageError):
    """A page that cannot be served: the message says why and what would do."""


def listening(port: int) -> socket.socket:
    """A socket on this machine's own address; LiveError if the port is taken."""
    if not 0 <= port < 2**16:
        raise LiveError(f"--live {port}: a port is a number from 0 (any that is free) to 65535")
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise LiveError(
            f"--live {port}: this port cannot be had ({error.strerror or error}); give another, or 0 for "
            "any that is free"
        ) from None


@contextmanager
def shown(
    run: str | os.PathLike[str], port: int | None, say: Callable[[str], None]
) -> Iterator[None]:
    """Shows a run on this port for as long as the context lasts; None: nowhere. Raises LiveError if the port is
    taken."""
    if port is None:
        yield
        return
    if not os.fspath(run):
        raise LiveError(f"--live {port}: there is no run folder to show; name one with --run-dir")
    with listening(port) as sock:
        child = subprocess.Popen(
            interpreter.command("sluice.agent.report.live:serve", sock.fileno(), os.fspath(run)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(sock.fileno(),),
            process_group=0,
        )  # an interrupt is the run's: this ends with it
        say(f"http://{HOST}:{sock.getsockname()[1]}/ shows this run while it lasts")
    assert child.stdin is not None
    try:
        yield
    finally:
        child.stdin.close()  # so it ends, also where this process is killed
        try:
            child.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
