"""Live set-ups in which tuning matters, small enough for two cores: `SETUPS`; `Session` runs one, `Turn` measures it.

Their transforms and stores wait rather than compute where they can, so that the worth of a setting does not depend on
how many cores there are. Each has a list of settings, of which the best is found by measuring.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice.agent.costs.rates import rates
from sluice.benchmarks import live_setups
from sluice.common.errors import UsageError
from sluice.ingest.batch import Batch
from sluice.ingest.flow.series import SERIES_ROWS
from sluice.ingest.knobs import Knobs
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.sources import Reading
from sluice.ingest.row_order import Order
from sluice.ingest.stages.transform import Function, Transform
from sluice.ingest.stats import Snapshot

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

BATCH_ROWS = 8192
WINDOW_ROWS = 8192  # small, so that a few seconds hold many windows
TABLE: dict[str, Any] = {"rows": 524_288, "row_group_rows": 8192, "splits": {"train": 1.0}}
"""The arguments with which `benchmarks.small_table.small_table` makes the table."""
_MIB = 2**20
_LOOKUP_S, _LIGHT_S, _HEAVY_S = 0.008, 0.004, 0.016
_TRACK_S, _SEEK_S = 0.005, 0.008
_LOOPS = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A table, a trainer, and something between them that slows loading."""

    name: str
    about: str
    settings: tuple[str, ...]
    """The settings as `Knobs.parse` reads them, added to one worker a stage."""
    latency_s: float = 0.0
    """The time that the store waits before each row group."""
    transforms: tuple[str, ...] = ()
    """Names of functions in this module, each a stage of its own."""
    shared: bool = False
    """Whether the transforms share something in this process's memory, so that they only run on threads."""
    step_s: float = 0.0
    """The time that the trainer takes for a batch."""
    spare_bytes: int = 0
    """The memory above the least that will do; 0: no limit but the machine's."""


SETUPS = (
    Setup(
        name="far store",
        about="50 ms before each row group",
        latency_s=0.05,
        settings=(
            "fetch=1",
            "fetch=2",
            "fetch=6",
            "fetch=16",
            "fetch=40",
            "fetch=3",
            "fetch=4",
            "fetch=8",
            "fetch=10",
            "fetch=24",
            "fetch=32",
        ),
    ),
    Setup(
        name="one arm",
        about="a transform behind one arm that has to seek for each other caller: best alone",
        transforms=("seek",),
        shared=True,
        settings=(
            "seek=1",
            "seek=2",
            "seek=4",
            "seek=1,decode=2",
            "seek=3",
            "seek=2,decode=2",
            "seek=4,decode=2",
        ),
    ),
    Setup(
        name="pure Python",
        about="a transform that holds the interpreter's lock",
        transforms=("python",),
        settings=(
            "python=1",
            "python=2",
            "python=1,python.backend=process",
            "python=2,python.backend=process",
            "python=4",
            "python=3,python.backend=process",
            "python=4,python.backend=process",
            "python=2,decode=2,python.backend=process",
            "python=3",
            "python=1,decode=2",
            "python=2,decode=2",
        ),
    ),
    Setup(
        name="slow trainer",
        about="a trainer of 25 ms a batch, and 20 ms before each row group",
        step_s=0.025,
        latency_s=0.02,
        settings=(
            "fetch=1",
            "fetch=2",
            "fetch=4",
            "fetch=8",
            "fetch=3",
            "fetch=6",
            "fetch=16",
            "fetch=32",
        ),
    ),
    Setup(
        name="little memory",
        about="50 ms before each row group, within 192 MiB above the least memory",
        latency_s=0.05,
        spare_bytes=192 * _MIB,
        settings=(
            "fetch=1",
            "fetch=2",
            "fetch=6",
            "fetch=16",
            "fetch=32",
            "fetch=3",
            "fetch=4",
            "fetch=8",
            "fetch=10",
            "fetch=12",
            "fetch=24",
        ),
    ),
    Setup(
        name="two transforms",
        about="two lookups, one four times as slow as the other",
        transforms=("light", "heavy"),
        settings=(
            "light=1,heavy=1",
            "light=2,heavy=2",
            "light=1,heavy=4",
            "light=4,heavy=1",
            "light=2,heavy=4",
            "light=1,heavy=2",
            "light=1,heavy=3",
            "light=2,heavy=1",
            "light=2,heavy=3",
            "light=4,heavy=4",
            "light=3,heavy=4,decode=2",
            "light=4,heavy=12,decode=2",
        ),
    ),
    Setup(
        name="store and lookup",
        about="30 ms before each row group, then a lookup of 8 ms a batch",
        latency_s=0.03,
        transforms=("lookup",),
        settings=(
            "fetch=1,lookup=1",
            "fetch=4,lookup=1",
            "fetch=4,lookup=4",
            "fetch=12,lookup=2",
            "fetch=2,lookup=4",
            "fetch=2,lookup=1",
            "fetch=2,lookup=2",
            "fetch=6,lookup=2",
            "fetch=8,lookup=3",
            "fetch=12,lookup=4",
            "fetch=20,lookup=4",
            "fetch=16,lookup=3",
            "fetch=24,lookup=10",
        ),
    ),
)


# ---- the transforms. Each leaves the batch as it is: only what it costs matters.


class _Arm:
    """Serves its callers in the order in which they came, and seeks whenever it turns to another one."""

    def __init__(self) -> None:
        self._turn, self._next, self._serving, self._caller = threading.Condition(), 0, 0, 0

    def read(self) -> None:
        with self._turn:
            ticket, self._next = self._next, self._next + 1
            self._turn.wait_for(lambda: self._serving == ticket)
        if self._caller != threading.get_ident():
            self._caller = threading.get_ident()
            time.sleep(_SEEK_S)
        time.sleep(_TRACK_S)
        with self._turn:
            self._serving += 1
            self._turn.notify_all()


_ARM = _Arm()


def seek(_: Mapping[str, Any]) -> None:
    """Reads from a device with one arm for all callers."""
    _ARM.read()


def python(_: Mapping[str, Any]) -> None:
    """Computes in Python."""
    total = 0
    for i in range(_LOOPS):
        total += i & 7


def lookup(_: Mapping[str, Any]) -> None:
    """Waits as for the answer of a service."""
    time.sleep(_LOOKUP_S)


def light(_: Mapping[str, Any]) -> None:
    """Waits as for a quick answer of a service."""
    time.sleep(_LIGHT_S)


def heavy(_: Mapping[str, Any]) -> None:
    """Waits as for a slow answer of a service."""
    time.sleep(_HEAVY_S)


_STRETCH = SERIES_ROWS // BATCH_ROWS  # batches that come together
_WARM_S, _WARM_PROCESS_S = (
    0.8,
    2.0,
)  # until work from before a change has drained; until processes have started


class LiveError(UsageError):
    """A pipeline that brought no rows: the message says with which knobs."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one setting did in one turn."""

    rows_per_s: float
    stall: float
    cpu: float
    """Cores used."""

    @classmethod
    def of(cls, before: Snapshot, after: Snapshot, knobs: Knobs) -> Turn:
        seen = rates(before, after)
        if seen is None or seen.rows_per_s <= 0:
            raise LiveError(f"no rows came with {knobs}; measure longer")
        return cls(seen.rows_per_s, seen.stall, seen.cpu)


class Session:
    """One live pipeline of a set-up, and its trainer."""

    def __init__(self, setup: Setup, table: FeatureTable) -> None:
        self.setup = setup
        limit = None
        if setup.spare_bytes:
            with self._loader(table, None) as unbound:
                limit = unbound.pipeline.least_limit + setup.spare_bytes
        self.tunable = self._loader(table, limit)
        self._batches = self._forever()
        self._came = self._usual = 0.0  # when the last series came; the usual time between two

    def _loader(self, table: FeatureTable, limit: int | None) -> BatchLoader:
        latency_s = self.setup.latency_s
        far = f"latency_ms={1000 * latency_s:g}" if latency_s else ""
        transforms = [
            Transform(self._function(n), n, apart=True, pure=True) for n in self.setup.transforms
        ]
        return BatchLoader(
            table,
            batch_size=BATCH_ROWS,
            read_ahead_epochs=sys.maxsize,
            memory_limit=limit,
            reading=Reading(files=FileOpener(disturbed=far)),
            knobs=Knobs(workers={"decode": 1}),
            transforms=transforms,
            order=Order(window_rows=WINDOW_ROWS),
        )

    def _function(self, name: str) -> Function | str:
        function: Function = getattr(live_setups, name)
        return function if self.setup.shared else f"{live_setups.__name__}:{name}"

    def _forever(self) -> Iterator[Batch]:
        while True:
            yield from self.tunable

    def setting(self, text: str) -> Knobs:
        """Parses one of the set-up's settings: stages that it does not name have one worker, on threads."""
        alone = Knobs(
            workers=dict.fromkeys(self.tunable.knobs.workers, 1),
            backend=dict.fromkeys(self.tunable.limits.backends, "thread"),
        )
        return alone.parse(text)

    def run(self, seconds: float) -> tuple[Snapshot, Snapshot]:
        """Takes batches for that many seconds, and on to the next wait: returns the moments, first and last, when rows
        came after one.

        Batches of a series come together. Any other moment would show chance more than the setting."""
        self._came = time.monotonic()
        while not self._next_series():
            pass
        first = self.tunable.snapshot()
        while not (self._next_series() and self._came >= first.at + seconds):
            pass
        return first, self.tunable.snapshot()

    def _next_series(self) -> bool:
        """Takes the batches up to the first of the next series, and says whether it came late enough to begin a
        bunch."""
        while True:
            if self.setup.step_s:
                time.sleep(self.setup.step_s)
            if next(self._batches).step % _STRETCH == 0:
                break
        gap, self._came = time.monotonic() - self._came, time.monotonic()
        self._usual += (gap - self._usual) / 8
        return gap >= self._usual / 2

    def measure(self, knobs: Knobs, seconds: float) -> tuple[Snapshot, Snapshot]:
        """Runs for that many seconds with these knobs, once they have settled."""
        moved = self.tunable.knobs.backend != knobs.backend and "process" in knobs.backend.values()
        self.tunable.apply(knobs)
        self.run(_WARM_PROCESS_S if moved else _WARM_S)
        return self.run(seconds)

    def close(self) -> None:
        self.tunable.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
