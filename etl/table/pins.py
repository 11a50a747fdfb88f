"""`Pin`: vacuum keeps a pinned version until the pin expires or is released. `announce_removal` shows readers what a
vacuum is removing.

A reader that holds a pin has a whole version, or gets an error. A vacuum writes what it removes, looks for pins,
removes files, and removes what it wrote. A reader pins, looks for removals, and then for its files. If the vacuum does
not see the pin, the reader sees the removal, or that files are missing.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sluice.common.stores import StoreError
from sluice.etl.table.fitted_state import FittedState
from sluice.etl.table.store import TableStore, folder_of_tails
from sluice.etl.table.table import FeatureTable, LostVersion

T = TypeVar("T")
FOLDER = "_sluice/pins"
_REMOVALS = "_sluice/vacuums"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One reader's claim to a version. Times are seconds since 1970."""

    name: str
    """The name of the reader, for instance of a run. Saving a pin again renews it."""
    version: int
    expires: float

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise StoreError(
                f"pin name {self.name!r}: must be 1 to 100 letters, digits, '.', '_' and '-'"
            )

    def save(self, store: TableStore) -> None:
        """Takes or renews the pin. Renew it well before it expires."""
        store.write_json(
            f"{FOLDER}/{self.name}.json", {"version": self.version, "expires": self.expires}
        )

    def release(self, store: TableStore) -> None:
        store.remove(f"{FOLDER}/{self.name}.json")


def pins(store: TableStore, now: float) -> tuple[Pin, ...]:
    """Returns the pins that have not expired. Raises StoreError for an unreadable pin, because a reader may need its
    files."""

    def read(path: str, about: Any) -> Pin:
        name = path.rsplit("/", 1)[-1][:-5]
        return Pin(name=name, version=int(about["version"]), expires=float(about["expires"]))

    every = _read_each(store, FOLDER, "it is a pin; remove the file if no reader uses it", read)
    return tuple(pin for pin in every if pin.expires > now)


def _read_each(
    store: TableStore, folder: str, hint: str, read: Callable[[str, Any], T]
) -> Iterator[T]:
    """Reads the JSON files of a folder. Raises StoreError, with a hint, for one that cannot be read."""
    for path in _json_files(store, folder):
        try:
            pin = read(path, store.read_json(path))
        except FileNotFoundError:  # it was removed just now
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{store.url(path)}: cannot be read ({error}); {hint}") from None
        yield pin


def _json_files(store: TableStore, folder: str) -> tuple[str, ...]:
    return tuple(path for path in store.files(folder) if path.endswith(".json"))


def announce_removal(store: TableStore, removed: Iterable[str], remaining: Iterable[str]) -> str:
    """Writes which folders of jobs and states lose files, and returns the path. Leaves out folders that also hold a
    kept file."""
    path = f"{_REMOVALS}/{uuid.uuid4().hex}.json"
    store.write_json(path, {"folders": sorted(folders_of(removed) - folders_of(remaining))})
    return path


def being_removed(store: TableStore) -> frozenset[str]:
    """Returns the folders that running vacuums remove. Includes those of a killed vacuum until the next vacuum ends."""
    hint = "it is a vacuum's list of removals; remove this file if no vacuum is running"
    return frozenset().union(
        *_read_each(store, _REMOVALS, hint, lambda _, about: map(str, about["folders"]))
    )


def removals(store: TableStore) -> tuple[str, ...]:
    """Returns the files in which vacuums list what they remove."""
    return _json_files(store, _REMOVALS)


def folders_of(paths: Iterable[str]) -> frozenset[str]:
    """Returns the folders of jobs and states of these paths: `data/JOB`, `_sluice/state/HASH`. A record's path stays as
    it is."""
    return frozenset(
        "/".join(path.split("/")[: 2 if path.startswith("data/") else 3]) for path in paths
    )


LASTS_S = 3600.0
"""The lifetime of a pin after its renewal. A killed reader keeps its version that long."""


class PinKeeper:
    """A context with a pin, which a thread renews. If the table cannot be written, it warns once, and the reader
    continues without a pin."""

    def __init__(
        self,
        reader: str,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.time,
        every_s: float = LASTS_S / 4,
    ) -> None:
        self._reader = re.sub("[^A-Za-z0-9._-]", "-", reader)[:80]
        self._say = say
        self._clock = clock
        self._every_s = every_s
        self._held: list[tuple[TableStore, Pin]] = []
        self._has_warned = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._renew_until_ended, name="sluice-pin", daemon=True
        )

    def take(self, uri: str, version: int) -> None:
        """Pins this version instead of the one before. Raises LostVersion, and keeps the pin before, unless the version
        is whole and stays so."""
        with self.moving(uri, version):
            pass

    @contextmanager
    def moving(self, uri: str, version: int) -> Iterator[None]:
        """Does what `take` does, but releases the version before only at the end of the context. After an error in the
        context it releases the new version instead."""
        store = TableStore(uri)
        pin = Pin(name=f"{self._reader}-{uuid.uuid4().hex[:8]}", version=version, expires=0.0)
        before, new = tuple(self._held), (store, pin)
        try:
            with self._lock:
                self._held.append(new)
                is_pinned = self._save(store, pin)
            if is_pinned:
                _check_whole(store, version)
            yield
        except BaseException:
            self._drop(new)
            raise
        self._drop(*before)

    def __enter__(self) -> PinKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.release()

    def release(self) -> None:
        """Removes the pin. Any thread may call it, for a process that ends without leaving the context."""
        for store, pin in self._held:
            self._remove(store, pin)

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._lock:
                for store, pin in self._held:
                    self._save(store, pin)

    def _save(self, store: TableStore, pin: Pin) -> bool:
        """Saves the pin. Returns whether the version is pinned now."""
        try:
            replace(pin, expires=self._clock() + LASTS_S).save(store)
        except OSError as error:
            self._warn(
                f"{store.uri}: version {pin.version} cannot be pinned ({error.strerror or error}), so a vacuum may "
                "remove it while it is read"
            )
            return False
        return True

    def _drop(self, *dropped: tuple[TableStore, Pin]) -> None:
        with self._lock:
            for store, pin in dropped:
                self._held.remove((store, pin))
                self._remove(store, pin)

    def _remove(self, store: TableStore, pin: Pin) -> None:
        try:
            pin.release(store)
        except OSError as error:
            self._warn(
                f"{store.uri}: the pin {pin.name} cannot be removed ({error.strerror or error}); it expires "
                f"within {LASTS_S:g} s"
            )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(text)


def needed_files(store: TableStore, table: FeatureTable) -> set[str]:
    """Returns the files that a version needs: records, data, learned states, and the tails for serving."""
    files = {f"_sluice/jobs/{job}.json" for job in table.records}
    files.update(store.relative(f.path) for f in table.files)
    if table.records:
        files.update(store.files(folder_of_tails(table.record.job)))
    for state in {r.state for r in table.records.values() if r.state}:
        files |= {f"_sluice/state/{state}/state.json", *FittedState.files(store, state)}
    return files


def _check_whole(store: TableStore, version: int) -> None:
    """Raises LostVersion if a vacuum removes a pinned version, or has removed a part of it before the pin."""
    going = being_removed(store)
    try:
        needs = needed_files(store, FeatureTable.open(store.uri, version))
        # Two folders are listed, instead of one request for each file.
        there = {*store.files("data"), *store.files("_sluice")}
        missing = {path for path in needs - there if store.size(path) is None}
        lost = missing | (folders_of(needs) & going)
    except FileNotFoundError as error:
        lost = {str(error.filename or error)}
    if not lost:
        return
    raise LostVersion(
        f"{store.uri}: a vacuum has removed version {version}, or is removing it ({min(lost)}); start again on the "
        "newest version"
    )
