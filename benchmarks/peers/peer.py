"""A peer in an environment of its own, seen from the race: `Peer`, and where `make bench-peers` puts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.serve import Job

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

    @property
    def python(self) -> Path:
        if not self.environment:
            return Path(sys.executable)
        return ROOT / f".venv-peers-{self.environment}" / "bin" / "python"


PEERS = (
    Kind("tf.data", "tf_data", "tf", "AUTOTUNE"),
    Kind("Ray Data", "ray_data", "ray"),
    Kind("petastorm BatchedDataLoader", "petastorm_batched", "petastorm"),
    Kind("Hugging Face datasets", "hf_datasets", "torch", "mapped Arrow"),
    Kind("mosaicml-streaming", "mosaic_streaming", "torch"),
    Kind("SPDL", "spdl", "torch"),
    Kind("LanceDB", "lancedb_streaming", "torch", "scan"),
    Kind("litData", "litdata_streaming", "torch"),
)


class PeerError(RuntimeError):
    """A peer that ended or could not do what it was asked: the message is its own."""


class Peer:
    """One process; between two turns it holds no iteration, so it takes no core."""

    def __init__(self, command: list[str], job: Job):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  it is closed with the peer
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        )
        try:
            told = self._ask(asdict(job))
        except BaseException:
            self.close()
            raise
        self.arms: list[str] = told["arms"]
        self.prepared_bytes: int = told["prepared_bytes"]
        self.prepared_seconds: float = told["prepared_seconds"]
        self.prepared_for: str = told["prepared_for"]

    @classmethod
    def start(cls, kind: Kind, job: Job) -> Peer:
        return cls([str(kind.python), "-m", f"benchmarks.peers.{kind.module}"], job)

    def turn(self, arm: str, seconds: float) -> tuple[float, float]:
        """Rows a second, and the nanoseconds of processor time that each took."""
        told = self._ask([arm, seconds])
        if "error" in told:
            raise PeerError(told["error"])
        return float(told["rows_per_s"]), float(told["row_ns"])

    def _ask(self, what: Any) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer either
            print(json.dumps(what), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            said = self._log.read().strip().splitlines()
            raise PeerError(f"it ended: {said[-1] if said else f'status {self._process.wait()}'}")
        found: Mapping[str, Any] = json.loads(answer)
        return found

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
