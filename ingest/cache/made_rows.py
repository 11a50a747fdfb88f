"""What functions over rows have made, by read: `MadeCache`.

It takes part in a run like this. The functions are called on reads before their rows are placed. The first read is
computed in other groupings too, and compared with an entry of an earlier run, if there is one: a function whose result
depends on more than its row is refused. A few reads are written and read back, which shows what entries cost. Then
`choose` says whether the others are kept.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa

from sluice.common.lines import say
from sluice.common.suggest import NamedFields
from sluice.ingest.cache.choice import CacheCosts
from sluice.ingest.cache.folder import CacheFolder
from sluice.ingest.cache.identity import Uncacheable, digest_of
from sluice.ingest.knobs import parse_bytes
from sluice.ingest.machine import cache_folder
from sluice.ingest.row_order import Read
from sluice.ingest.stages.transform import Transform, frame_of, given_by, needed_before

AUTO = "auto"
_TRIED = 4  # reads that are written and read back before the choice
_SAMPLE_ROWS = 64  # that are computed again, alone and in groups
_OTHER_THAN_KEPT = "is not what an earlier run has kept, though nothing that it names has changed"
Source = tuple[str | None, list[Any]]
"""A file on this machine, and what else decides the values of its rows. Without both, nothing tells of a change."""
_WORDS = {pa.float16(): pa.int16(), pa.float32(): pa.int32(), pa.float64(): pa.int64()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace(NamedFields):
    """Where a loader may keep what functions make, and how much of it."""

    folder: str = AUTO
    """The folder. `auto`: one in the user's cache folder."""
    limit_bytes: int = 20 * 2**30
    passes: int = 1
    """The passes over the rows that are still to come after the first."""
    tells: bool = True
    """Whether one line says what was chosen."""

    def open(self) -> CacheFolder:
        auto = cache_folder() / "made"
        return CacheFolder(auto if self.folder == AUTO else Path(self.folder), self.limit_bytes)


def place_of(
    folder: str | os.PathLike[str] | None, limit: int | str, epochs: int
) -> CachePlace | None:
    """Makes the place of a cache of a loader's arguments. None: no cache is asked for. A run of one epoch is taken to
    be followed by another one."""
    if folder is None:
        return None
    passes = max(1, epochs - 1)
    return CachePlace(folder=os.fspath(folder), limit_bytes=parse_bytes(limit), passes=passes)


class MadeCache:
    """The entries of one loader. Many threads can use it."""

    def __init__(
        self,
        place: CachePlace,
        functions: Sequence[Transform],
        wanted: Sequence[str],
        sources: Sequence[Source],
    ):
        """`functions` are the first ones over rows, all pure. `wanted` are the columns that are needed after them."""
        self.functions = tuple(functions)
        given = given_by(functions)
        self.made = tuple(name for name in wanted if name in given)
        self.rest = tuple(name for name in wanted if name not in given)
        """The columns that still come from the files."""
        self.names = ", ".join(repr(function.name) for function in functions)
        self._chain = digest_of(functions, self.made)
        self._sources, self._place = sources, place
        self._folder = place.open()
        self._lock = threading.Lock()
        self._unchecked = {function.name for function in functions}
        self._compared = self._refused = False
        self._tried: list[tuple[str, float, float, float]] = []
        """Of each read that was tried: its entry, and the seconds a row to make, to read back and to write."""
        self.costs: CacheCosts | None = None
        self.hits = self.computed = 0
        """How many rows came from entries, and were computed."""

    @property
    def is_used(self) -> bool:
        """Whether entries are still looked for or written."""
        return not self._refused and (self.costs is None or self.costs.is_worth_it)

    def get(self, read: Read) -> pa.Table | None:
        """Returns what the functions made of a read in an earlier pass. None: they must be called."""
        if self._unchecked or not self._compared or not self.is_used:
            return None
        found = self._entry(read)
        if found is not None:
            with self._lock:
                self.hits += read.rows
        return found

    def _entry(self, read: Read) -> pa.Table | None:
        name = self._name(read)
        found = self._folder.get(name) if name else None
        return found if found is not None and found.num_rows == read.rows else None

    def check(
        self, function: Transform, made: pa.Table, compute: Callable[[int, int], pa.Table]
    ) -> None:
        """Refuses a function whose rows differ if they are computed alone, or in other groups. `compute` does that for
        rows of the read that `made` is of. Each function is checked once."""
        with self._lock:
            if function.name not in self._unchecked or not made.num_rows:
                return
            names = [name for name in function.gives if name in made.column_names]
            why = "depends on the other rows of a call, or on chance, so it is not pure"
            self._check_sample(made.select(names), compute, why)
            self._unchecked.discard(function.name)

    def get_checked(self, read: Read, compute: Callable[[int, int], pa.Table]) -> pa.Table | None:
        """Returns what a single function made of a read in an earlier run, once a sample of it was computed again. So a
        run whose entries are all there computes no whole read. None: the function must be called."""
        with self._lock:
            if len(self.functions) == 1 and self._unchecked and self.is_used:
                found = self._entry(read)
                if found is None or not found.num_rows:
                    return None
                self._check_sample(found, compute, _OTHER_THAN_KEPT)
                self._unchecked.clear()
                self._compared = True
        return self.get(read)

    def _check_sample(
        self, made: pa.Table, compute: Callable[[int, int], pa.Table], why: str
    ) -> None:
        rows = min(made.num_rows, _SAMPLE_ROWS)
        bounds = sorted({min(cut, rows) for cut in (0, 1, 2, *range(5, rows, 7), rows)})
        again = pa.concat_tables([compute(a, b) for a, b in itertools.pairwise(bounds)])
        self._refuse_if_other(made.slice(0, rows), again, why)

    def put(self, read: Read, rows: pa.Table, made_s: float) -> None:
        """Keeps what the functions made of a read, in so many seconds."""
        name = self._name(read)
        with self._lock:
            self.computed += read.rows
            if not read.rows or not name or self._unchecked or not self.is_used:
                return
            made = rows.select(self.made).replace_schema_metadata(None)
            if not self._compared:
                self._compare(read, made)
                if self._refused:
                    return
            trying = self.costs is None
        began = time.perf_counter()
        self._folder.put(name, made)
        written = time.perf_counter()
        if not trying or self._folder.get(name) is None:
            return
        back_s = (time.perf_counter() - written) / read.rows
        with self._lock:
            if self.costs is None:
                each = name, made_s / read.rows, back_s, (written - began) / read.rows
                self._tried.append(each)
                if len(self._tried) >= _TRIED:
                    self._choose()

    def _choose(self) -> None:
        """Decides by the reads that were tried."""
        names, made, read, written = zip(*self._tried, strict=True)
        self.costs = CacheCosts(
            made_s=min(made),  # other work may only make it seem dearer
            read_s=fmean(read),
            written_s=fmean(written),
            passes=self._place.passes,
        )
        if self._place.tells:
            say(self.costs.describe(self.names))
        if not self.costs.is_worth_it:
            for name in names:
                self._folder.remove(name)

    def _compare(self, read: Read, made: pa.Table) -> None:
        """Compares the first read with its entry of an earlier run."""
        self._compared = True
        entry = self._entry(read)
        if entry is not None:
            self._refuse_if_other(made, entry, _OTHER_THAN_KEPT)

    def _refuse_if_other(self, made: pa.Table, other: pa.Table, why: str) -> None:
        for name in made.column_names:
            if _bits(made.column(name)) != _bits(other.column(name)):
                self._refused = True
                say(f"cache: nothing is kept of {self.names}: the column {name!r} {why}")
                return

    def _name(self, read: Read) -> str:
        """Returns the name of a read's entry. Empty: nothing tells whether its file has changed."""
        path, about = self._sources[read.file]
        state: list[int] = []
        if path:
            try:
                found = os.stat(path)
            except OSError:
                return ""
            state = [found.st_size, found.st_mtime_ns]
        elif not about:
            return ""
        whole = [self._chain, about, state, read.group, read.first, read.rows]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:40]

    def outcome(self) -> dict[str, Any]:
        """Returns the figures for a run's last line."""
        return {
            "rows_read": self.hits,
            "rows_made": self.computed,
            "choice": self.costs.describe(self.names) if self.costs else "",
        }


def cacheable(functions: Sequence[Transform]) -> tuple[Transform, ...]:
    """Returns the first functions over rows whose results may be kept: those that are pure."""
    known: list[Transform] = []
    for function in functions:
        if not function.pure or frame_of(function):
            break
        known.append(function)
    return tuple(known)


def cache_of(
    place: CachePlace | None,
    functions: Sequence[Transform],
    result: Sequence[str],
    files: int,
    source_of: Callable[[int], Source],
) -> MadeCache | None:
    """Returns the cache of a loader. None: there is none, which one line explains if one was asked for."""
    if place is None:
        return None
    first = cacheable(functions)
    if not first:
        say(
            "cache: nothing is kept, as no function over rows is marked pure=True, or one before it is not. A "
            "training's is marked by @pure, and must read and give numbers or single ids as the table stores them"
        )
        return None
    try:
        wanted = needed_before(result, functions[len(first) :])
        return MadeCache(place, first, wanted, [source_of(n) for n in range(files)])
    except Uncacheable as error:
        say(f"cache: nothing is kept: {error}")
        return None


def _bits(column: pa.ChunkedArray) -> list[str]:
    """Returns a column's values such that equal bits are equal, also those of NaN."""
    words = _WORDS.get(column.type)
    chunks = column.chunks if words is None else [chunk.view(words) for chunk in column.chunks]
    return [repr(value) for chunk in chunks for value in chunk.to_pylist()]
