"""Shares a host's cores between its jobs: `CoreClaims`, a folder in which each running job has a file.

A job says how many cores it can use, or that it takes all it gets; the latter divide what the others leave. A file is
locked by its job, and the kernel frees that lock however the job ends: a file that can be locked belongs to a dead job
and is removed. Claims are voluntary: if the folder cannot be used, one line says so and the run goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sluice.agent.costs.rates import rates
from sluice.agent.planner_settings import DEFAULT
from sluice.agent.runtime_settings import RUNTIME
from sluice.agent.tunable import Tunable
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

_SUFFIX = ".claim"


def fair(cores: float, wants: Sequence[float | None]) -> list[float]:
    """Each job's part, max–min fair: none gets more than it wants, and one that gets less gets as much as any other.
    None means that a job wants everything."""
    parts, left = [0.0] * len(wants), cores
    asked = sorted((math.inf if want is None else want, n) for n, want in enumerate(wants))
    for served, (want, n) in enumerate(asked):
        parts[n] = min(want, left / (len(asked) - served))
        left -= parts[n]
    return parts


class CoreClaims:
    """A job's claim. It is a context that lasts for as long as the job runs."""

    def __init__(
        self, folder: str | os.PathLike[str], *, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._folder, self._say = Path(folder) / boot_name(), say
        self._path = self._folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
        self._file: int | None = (
            None  # open and locked while the job runs; nothing waits in a buffer for a full disk
        )

    def __enter__(self) -> CoreClaims:
        hidden = self._path.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write(None)
            hidden.rename(self._path)  # seen by others only once it is locked
        except OSError as error:
            with contextlib.suppress(OSError):
                hidden.unlink()
            self._give_up(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = None

    def share(self, cores: float, wants: float | None) -> float:
        """This job's part of the cores that it is allowed to use."""
        if self._file is None:
            return cores
        try:
            self._write(wants)
            others = [
                want
                for path in self._folder.glob(f"*{_SUFFIX}")
                if path != self._path
                for want in _living(path)
            ]
        except OSError as error:
            self._give_up(error)
            return cores
        return fair(cores, [wants, *others])[0]

    def _write(self, wants: float | None) -> None:
        if self._file is not None:
            os.ftruncate(self._file, os.pwrite(self._file, json.dumps(wants).encode(), 0))

    def _give_up(self, error: OSError) -> None:
        self._say(
            f"cores are not shared with other jobs, as {self._folder} cannot be used: {error}"
        )
        self.__exit__()


class CoreSharingTunable:
    """A Tunable whose snapshots show the job's part of the cores as all cores."""

    def __init__(self, tunable: Tunable, claims: CoreClaims, *, ranks: int = 1) -> None:
        """`ranks` is the number of this host's ranks, of which the tunable's snapshots are the mean."""
        self._tunable = tunable
        self._claims = claims
        self._ranks = ranks
        self._last: Snapshot | None = None
        self._calm = 0
        self._wants: float | None = None

    @property
    def limits(self) -> Limits:
        return self._tunable.limits

    @property
    def knobs(self) -> Knobs:
        return self._tunable.knobs

    def apply(self, knobs: Knobs) -> None:
        self._tunable.apply(knobs)

    def snapshot(self) -> Snapshot:
        snapshot = self._tunable.snapshot()
        self._claim(snapshot)
        cores = self._claims.share(self._ranks * snapshot.cpu_quota, self._wants)
        return replace(snapshot, cpu_quota=cores / self._ranks)

    def _claim(self, snapshot: Snapshot) -> None:
        measured = rates(self._last, snapshot) if self._last is not None else None
        self._last = snapshot
        if measured is None:
            return
        self._calm = (
            self._calm + 1 if measured.stall <= DEFAULT.fed_stall and measured.rows_per_s else 0
        )
        if measured.stall > RUNTIME.starved_stall:
            self._wants = None
        elif self._calm >= RUNTIME.calm_looks:
            used = self._ranks * measured.cpu
            wants = _rounded_up(RUNTIME.claimed_ratio * used)
            if self._wants is None or not _rounded_up(used) <= self._wants <= 2 * wants:
                self._wants = wants


def _rounded_up(cores: float) -> float:
    return RUNTIME.claim_step * math.ceil(cores / RUNTIME.claim_step)


def _living(path: Path) -> list[float | None]:
    """What a job wants, as a list of one; empty if the job is dead, and then its file is removed."""
    try:
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return [_number(file.read())]
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    return []


def _number(text: str) -> float | None:
    """A claim's number of cores; None, which means everything, if the text is damaged or just being written."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return float(value) if isinstance(value, (int, float)) and 0 < value < math.inf else None


def boot_name() -> str:
    """A name for this host until its next restart, as several hosts may see the same folder. psutil only knows when the
    host started, and hosts may start together."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
