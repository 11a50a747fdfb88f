"""A store in memory for a storm: `MemoryGroups`, the loader's own `RowGroupReader` over the tables in `TABLES`.

Its reads are slow, fail for a while, or for good, as the run's `Weather` says; they are tried again by the loader's own
`Retrier` on the run's clock."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from sluice.ingest.read.decoding import Decoding
from sluice.ingest.read.kept_files import KeptFiles
from tests.product import Clock, DataFile, FileOpener, Retrier, RetryPolicy, RowGroupReader
from tests.storm.scheduler import Scheduler
from tests.storm.threads import current

TABLES: dict[str, tuple[pa.Table, ...]] = {}
"""A file's path → its row groups."""


class Weather:
    """How the store does in one run."""

    def __init__(
        self,
        run: Scheduler,
        *,
        slow: float = 0.0,
        failing: float = 0.0,
        lost: tuple[str, int] | None = None,
        broken: tuple[str, int] | None = None,
    ):
        """Shares of reads that take long, and that fail, three times in a row at most. `lost` is a row group whose
        reads always fail, `broken` one that is no Parquet any more."""
        self._run, self._slow, self._failing, self._lost, self._broken = (
            run,
            slow,
            failing,
            lost,
            broken,
        )
        self._failed: dict[tuple[str, int], int] = {}
        self.stalls = self.errors = self.reads = 0

    def read(self, path: str, group: int, clock: Clock) -> pa.Table:
        run, key = self._run, (path, group)
        run.point("read")
        self.reads += 1
        if run.chance.random() < self._slow:
            self.stalls += 1
            clock.sleep(run.chance.random() * 2.0)
        if key == self._broken:
            raise pa.ArrowInvalid("no Parquet any more")
        if key == self._lost or (
            run.chance.random() < self._failing and self._failed.get(key, 0) < 3
        ):
            self.errors += 1
            self._failed[key] = self._failed.get(key, 0) + 1
            raise OSError("the store does not answer")
        self._failed.pop(key, None)
        return TABLES[path][group]


class _File:
    """Where a reader has a LocalFile."""

    def __init__(self, path: str, read: Callable[[str, int], pa.Table]):
        self._path, self._read = path, read

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        return self._read(self._path, group).select(columns)

    def read_stored(self, *_: Any) -> None:
        """No column is stored in pages."""

    def drop_fetched(self) -> None:
        """Nothing was fetched."""

    def close(self) -> None:
        """Nothing is open."""


class MemoryFiles(KeptFiles):
    """Files in memory. Their reads wait on the clock of the opener, which a reader stops."""

    def __init__(self, files: Sequence[DataFile], located: Any, opener: FileOpener):
        run = current()
        self._weather: Weather = run.world.weather
        self._clock = opener._clock
        self._retrier = Retrier(RetryPolicy(), self._clock, run.chance.random)
        super().__init__(files, located, opener)

    def take(self, number: int) -> Any:
        return _File(
            self.files[number].path,
            lambda path, group: self._retrier.call(
                lambda: self._weather.read(path, group, self._clock), path
            ),
        )

    def _is_unchanged(self, number: int, file: Any) -> bool:
        """Nobody replaces a file in memory."""
        return True

    def _check_sizes(self) -> None:
        """They are as they are."""


class MemoryGroups(RowGroupReader):
    """Row groups in memory."""

    def _schema(self, names: Sequence[str]) -> pa.Schema:
        whole = TABLES[self.files[0].path][0].schema
        return pa.schema([whole.field(name) for name in names])

    def _decoding(self, bags: Mapping[str, float]) -> Decoding:
        return decoding(self.files, self.columns)


def decoding(files: Sequence[DataFile], columns: Sequence[str]) -> Decoding:
    """What row groups take: there is nothing to decode, so nothing besides."""
    tables = [
        table.select(columns) for file in files for table in TABLES[file.path] if table.num_rows
    ]
    return Decoding(max(table.nbytes / table.num_rows for table in tables), 0, (tuple(columns),))
