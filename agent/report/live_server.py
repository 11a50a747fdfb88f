"""Shows a run's page during the run: `shown`. Another process serves it, with `sluice.agent.report.live`."""

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
    """The port for the page of a growing run."""

    title = "page"
    live: int | None = setting(
        None,
        "show the run's page while it lasts, on this port of 127.0.0.1 (0: any that is free)",
        metavar="PORT",
        least=0,
    )


class LiveError(UsageError):
    """A page that cannot be served. The message gives the reason and what to do."""


def listening(port: int) -> socket.socket:
    """Returns a socket on 127.0.0.1. Raises LiveError if the port is taken."""
    if not 0 <= port < 2**16:
        raise LiveError(f"--live {port}: a port is a number from 0 (any that is free) to 65535")
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise LiveError(
            f"--live {port}: this port is not available ({error.strerror or error}); choose another, or 0 for "
            "any free port"
        ) from None


@contextmanager
def shown(
    run: str | os.PathLike[str], port: int | None, say: Callable[[str], None]
) -> Iterator[None]:
    """Shows a run on this port while the context lasts. None: no page. Raises LiveError if the port is taken."""
    if port is None:
        yield
        return
    if not os.fspath(run):
        raise LiveError(f"--live {port}: there is no run folder to show; name one with --run-dir")
    with listening(port) as sock:
        # The process has its own group, because an interrupt is meant for the run. It ends with the run.
        child = subprocess.Popen(
            interpreter.command("sluice.agent.report.live:serve", sock.fileno(), os.fspath(run)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(sock.fileno(),),
            process_group=0,
        )
        say(f"http://{HOST}:{sock.getsockname()[1]}/ shows this run while it lasts")
    assert child.stdin is not None
    try:
        yield
    finally:
        child.stdin.close()  # The process ends at the end of its input, also if this process is killed.
        try:
            child.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
