"""Hosts for tests of training on many of them: each has an address, a name, and processes of its own, as namespaces of
Linux. No root is needed, and nothing outside the namespaces changes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}
_ALL = ("--user", "--net", "--mount", "--uts", "--pid")
_NETWORK = "10.77.0"
# The first process of a set of namespaces reads a pipe of the test's. If the test ends in any way, that process ends,
# and the kernel ends all others of its namespace.
_WAIT = "echo ready && exec cat"
_SWITCH = f"ip link add switch type bridge && ip link set switch up && {_WAIT}"
_HOST = f'hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && {_WAIT}'
_UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child")


class _NotPossible(Exception):
    """This machine or this user cannot do it."""


class Hosts:
    """So many hosts on one switch, host0 and so on. They share all files but /etc/hosts."""

    def __init__(self, count: int, folder: Path) -> None:
        """`folder` gets what the programs on the hosts print."""
        self._count = count
        self._folder = folder
        self._stack = ExitStack()
        self._switch = 0
        self._first: list[int] = []
        """The process id of the first process of each host."""

    def __enter__(self) -> Hosts:
        for tool, package in _TOOLS.items():
            if shutil.which(tool) is None:
                pytest.skip(f"no hosts: {tool} is missing (Debian: apt-get install {package})")
        try:
            self._make()
        except _NotPossible as error:
            pytest.skip(f"no hosts: {error}")
        return self

    def _make(self) -> None:
        addresses = self._folder / "hosts"
        names = (f"{_NETWORK}.{host + 1} host{host}\n" for host in range(self._count))
        addresses.write_text("127.0.0.1 localhost\n" + "".join(names))
        with ExitStack() as stack:
            self._stack = stack
            self._switch = self._begin([*_UNSHARE, "--user", "--map-root-user"], _SWITCH)
            for host in range(self._count):
                inside = _inside(self._switch, "--user", "--net")
                words = [*inside, *_UNSHARE, "--uts", "--mount", "--mount-proc"]
                self._first.append(self._begin(words, _HOST, f"host{host}", str(addresses)))
                self._plug(host)
            self._stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self, host: int, words: Sequence[object], name: str, *, cwd: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Starts a program on a host. What it prints goes to `NAME.out` and `NAME.err`."""
        inside = [*_inside(self._first[host], *_ALL), "env", f"--chdir={cwd}"]
        with (
            open(self._folder / f"{name}.out", "wb") as out,
            open(self._folder / f"{name}.err", "wb") as err,
        ):
            process = subprocess.Popen(
                [*inside, *map(str, words)], stdout=out, stderr=err, env=dict(env)
            )
        self._stack.callback(_end, process)
        return process

    def cut(self, host: int) -> None:
        """Takes a host's cable out: nothing reaches it, and nothing comes from it."""
        self._at_switch(f"ip link set port{host} down")

    def connect(self, host: int) -> None:
        """Ends what `cut` began."""
        self._at_switch(f"ip link set port{host} up")

    def lose(self, host: int) -> None:
        """Takes a host's power away: all that runs there ends, and no packet says so to the others."""
        self.cut(host)
        psutil.Process(self._first[host]).kill()

    def _begin(self, words: Sequence[str], script: str, *arguments: str) -> int:
        """Starts the first process of new namespaces, and returns its process id."""
        process = subprocess.Popen(
            [*words, "sh", "-ec", script, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._stack.callback(process.communicate)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise _NotPossible(process.communicate()[1].decode().strip())
        return psutil.Process(process.pid).children(recursive=True)[-1].pid

    def _plug(self, host: int) -> None:
        """Connects a host to the switch. The switch numbers processes as the test does."""
        port, pid = f"port{host}", self._first[host]
        self._at_switch(f"ip link add {port} type veth peer name eth0 netns {pid}")
        self._at_switch(f"ip link set {port} master switch up")
        self._at_host(host, f"ip address add {_NETWORK}.{host + 1}/24 dev eth0")
        self._at_host(host, "ip link set eth0 up")

    def _at_switch(self, words: str) -> None:
        _run([*_inside(self._switch, "--user", "--net"), *words.split()])

    def _at_host(self, host: int, words: str) -> None:
        _run([*_inside(self._first[host], "--user", "--net"), *words.split()])


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills (-9) a program that `Hosts.start` started; what it started itself goes on."""
    (program,) = psutil.Process(process.pid).children()
    program.kill()


def _inside(pid: int, *namespaces: str) -> list[str]:
    """The words before a command that is to run in namespaces of a process."""
    return ["nsenter", "--target", str(pid), *namespaces, "--preserve-credentials", "--"]


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _NotPossible(f"{' '.join(words)}: {done.stderr.strip()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
