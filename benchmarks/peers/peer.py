"""A peer in an environment of its own, seen from the race: `Peer`, and where `make bench-peers` puts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.memory import Memory
from benchmarks.peers.serve import Job, Turn
from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.suggest import nearest

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Which module a peer is, and which environment it runs in; without a name, in this one."""

    name: str
    module: str
    environment: str
    apart: str = ""
    """Settings whose names begin so have a line of their own."""
    root: Path = ROOT
    """The checkout that it is part of."""

    @property
    def python(self) -> Path:
        if not self.environment:
            return Path(sys.executable)
        return self.root / self.environment / "bin" / "python"


OURS = Kind("Sluice", "sluice_loader", "")
BY_HAND = Kind("torch DataLoader by hand", "torch_loader", "")
PEERS = (
    Kind("tf.data", "tf_data", ".venv-peers-tf", "AUTOTUNE"),
    Kind("Ray Data", "ray_data", ".venv-peers-ray"),
    Kind("petastorm BatchedDataLoader", "petastorm_batched", ".venv-peers-petastorm"),
    Kind("Hugging Face datasets", "hf_datasets", ".venv-peers-torch", "mapped Arrow"),
    Kind("mosaicml-streaming", "mosaic_streaming", ".venv-peers-torch"),
    Kind("SPDL", "spdl", ".venv-peers-torch"),
    Kind("LanceDB", "lancedb_streaming", ".venv-peers-torch", "scan"),
    Kind("litData", "litdata_streaming", ".venv-peers-torch", "from Parquet"),
    Kind("Grain", "grain_data", ".venv-peers-grain", "our shuffle"),
)


def installed(kinds: Sequence[Kind], only: Sequence[str]) -> list[Kind]:
    """Those kinds, or those of them that `only` names. Says which of them are not installed, and leaves these out."""
    known = {kind.name: kind for kind in kinds}
    for name in only:
        if name not in known:
            raise UsageError(
                f"--only: there is no peer {name!r}{nearest(name, known)}: {', '.join(known)}"
            )
    wanted = [kind for kind in kinds if not only or kind.name in only]
    if missing := [kind.name for kind in wanted if not kind.python.exists()]:
        say(f"not installed: {', '.join(missing)} (make bench-peers)")
    return [kind for kind in wanted if kind.python.exists()]


class PeerError(RuntimeError):
    """A peer that ended or could not do what it was asked: the message is its own."""


class Peer:
    """One process; between two turns it holds no iteration, so it takes no core."""

    def __init__(
        self,
        command: list[str],
        job: Job,
        memory: Memory | None = None,
        patience_s: float = 600.0,
        root: Path = ROOT,
    ):
        """`memory` limits it. An answer that takes longer than `patience_s` and the turn itself ends it."""
        self._memory, self._limit_s = memory, patience_s
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it is closed with the peer
        self._process = subprocess.Popen(
            memory.command(command) if memory else command,
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"},
        )
        if memory:
            memory.watch(self._process.pid)
        try:
            told = self._ask(asdict(job))
        except BaseException:
            self.close()
            raise
        self.arms: list[str] = told["arms"]
        self.prepared_bytes: int = told["prepared_bytes"]
        self.prepared_seconds: float = told["prepared_seconds"]
        self.prepared_for: str = told["prepared_for"]
        self.versions: dict[str, str] = told["versions"]

    @classmethod
    def start(cls, kind: Kind, job: Job, **how: Any) -> Peer:
        command = [str(kind.python), "-m", f"benchmarks.peers.{kind.module}"]
        return cls(command, job, root=kind.root, **how)

    def turn(self, arm: str, seconds: float) -> Turn:
        turn = Turn(**self._ask([arm, seconds], seconds))
        if self._memory:
            self._memory.look()
        return turn

    def _ask(self, what: Any, seconds: float = 0.0) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer either
            print(json.dumps(what), file=self._process.stdin, flush=True)
        late = threading.Timer(seconds + self._limit_s, self._process.kill)
        late.start()
        answer = self._process.stdout.readline()
        late.cancel()
        if not answer:
            self._log.seek(0)
            said = self._log.read().strip().splitlines()
            raise PeerError(f"it ended: {said[-1] if said else f'status {self._process.wait()}'}")
        told: Mapping[str, Any] = json.loads(answer)
        if "error" in told:
            raise PeerError(told["error"])
        return told

    def close(self) -> None:
        """Ends the process and what it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # no more requests: it leaves
        for way in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, way)  # and whoever it has left behind
        self._process.wait()
        self._process.stdout.close()
        self._log.close()
        if self._memory:
            self._memory.close()
