"""Shares a host's cores among its runs: `CoreClaims`, a folder in which each run has a file.

A run's file says how many cores the run can use, or that it takes all that it gets. Runs that take all divide what the
others leave. Each run locks its file, and the kernel frees the lock however the run ends. So a file that can be locked
belongs to a dead run and is removed. Claims are voluntary: if the folder cannot be used, one line says so and the run
goes on.
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
    """Returns each run's part of the cores. A want of None means all cores.

    The parts are max-min fair. A run gets no more than it wants. A run that gets less than that gets as much as any
    other run."""
    parts = [0.0] * len(wants)
    left = cores
    asked = sorted((math.inf if want is None else want, n) for n, want in enumerate(wants))
    for served, (want, n) in enumerate(asked):
        parts[n] = min(want, left / (len(asked) - served))
        left -= parts[n]
    return parts


class CoreClaims:
    """A run's claim to cores. Use it as a context for as long as the run lasts."""

    def __init__(
        self, folder: str | os.PathLike[str], *, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._folder = Path(folder) / boot_name()
        self._say = say
        self._path = self._folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
        # The file is open and locked while the run lasts. It has no buffer, so a full disk shows at once.
        self._file: int | None = None

    def __enter__(self) -> CoreClaims:
        hidden = self._path.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write(None)
            hidden.rename(self._path)  # Other runs see the file only after it is locked.
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
        """Returns this run's part of the `cores` that it is allowed to use. `wants` is None if it can use them all."""
        if self._file is None:
            return cores
        try:
            self._write(wants)
            others = [
                want
                for path in self._folder.glob(f"*{_SUFFIX}")
                if path != self._path
                for want in _read_claim(path)
            ]
        except OSError as error:
            self._give_up(error)
            return cores
        return fair(cores, [wants, *others])[0]

    def _write(self, wants: float | None) -> None:
        if self._file is not None:
            os.ftruncate(self._file, os.pwrite(self._file, json.dumps(wants).encode(), 0))

    def _give_up(self, error: OSError) -> None:
        """Says that the folder cannot be used, and ends the claim."""
        self._say(
            f"cores are not shared with other runs, as {self._folder} cannot be used: {error}"
        )
        self.__exit__()


class CoreSharingTunable:
    """A Tunable whose snapshots show only the run's part of the cores."""

    def __init__(self, tunable: Tunable, claims: CoreClaims, *, ranks: int = 1) -> None:
        """`ranks` is the number of this host's ranks. The tunable's snapshots are the mean of these ranks."""
        self._tunable = tunable
        self._claims = claims
        self._ranks = ranks
        self._last: Snapshot | None = None
        self._calm_looks = 0
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
        """Decides how many cores the run claims: all while it starves, and a little more than it uses when calm."""
        measured = rates(self._last, snapshot) if self._last is not None else None
        self._last = snapshot
        if measured is None:
            return
        self._calm_looks = (
            self._calm_looks + 1
            if measured.stall <= DEFAULT.fed_stall and measured.rows_per_s
            else 0
        )
        if measured.stall > RUNTIME.starved_stall:
            self._wants = None
        elif self._calm_looks >= RUNTIME.calm_looks:
            used = self._ranks * measured.cpu
            wants = _round_up(RUNTIME.claimed_ratio * used)
            if self._wants is None or not _round_up(used) <= self._wants <= 2 * wants:
                self._wants = wants


def _round_up(cores: float) -> float:
    return RUNTIME.claim_step * math.ceil(cores / RUNTIME.claim_step)


def _read_claim(path: Path) -> list[float | None]:
    """Returns a list with the cores that a run wants. If the run is dead, removes its file and returns []."""
    try:
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return [_parse_claim(file.read())]
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    return []


def _parse_claim(text: str) -> float | None:
    """Returns a claim's number of cores. None means all, also if the text is damaged or half written."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return float(value) if isinstance(value, (int, float)) and 0 < value < math.inf else None


def boot_name() -> str:
    """Returns a name for this host that is valid until its next restart. Several hosts may see the same folder.

    The time of the restart would not do as a name, because hosts may start together."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
