"""A reader's pin for as long as it reads: `Hold` takes it, renews it, and releases it at the end."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable

from etl.pins import Pin, being_removed, folders_of
from etl.store import Store, StoreError
from etl.table import FeatureTable

LASTS_S = 3600.0
"""From a renewal: so long a reader that was killed keeps its version."""


class Hold:
    """A context, with a thread that renews the pin in time. Where the table cannot be written, that is told once, and
    reading goes on without a pin."""

    def __init__(self, reader: str, say: Callable[[str], None], *, clock: Callable[[], float] = time.time,
                 every_s: float = LASTS_S / 4) -> None:
        self._pin = f"{re.sub('[^A-Za-z0-9._-]', '-', reader)[:80]}-{uuid.uuid4().hex[:8]}"
        self._say, self._clock, self._every_s = say, clock, every_s
        self._held: tuple[Store, int] | None = None
        self._told = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renewing, name="sluice-pin", daemon=True)

    def take(self, uri: str, version: int) -> None:
        """Pins this version, instead of the one that was held. StoreError if a vacuum has begun to remove it."""
        with self._lock:
            before, self._held = self._held, (Store(uri), version)
            pinned = self._save()
            if before is not None and before[0].uri != self._held[0].uri:
                self._release(before[0])
            if pinned and (going := being_removed(self._held[0])):
                _refuse(self._held[0], version, going)

    def __enter__(self) -> Hold:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.release()

    def release(self) -> None:
        """Removes the pin, from any thread; for a process that ends without leaving the context."""
        if self._held is not None:
            self._release(self._held[0])

    def _renewing(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._lock:
                self._save()

    def _save(self) -> bool:
        """Whether the version is pinned now."""
        if self._held is None:
            return False
        store, version = self._held
        try:
            Pin(name=self._pin, version=version, expires=self._clock() + LASTS_S).save(store)
        except OSError as error:
            self._tell(f"{store.uri}: version {version} cannot be pinned ({error.strerror or error}), so a vacuum may "
                       "remove it while it is read")
            return False
        return True

    def _release(self, store: Store) -> None:
        try:
            Pin(name=self._pin, version=0, expires=0).release(store)
        except OSError as error:
            self._tell(f"{store.uri}: the pin {self._pin} cannot be removed ({error.strerror or error}); it expires "
                       f"within {LASTS_S:g} s")

    def _tell(self, text: str) -> None:
        if not self._told:
            self._told = True
            self._say(text)


def _refuse(store: Store, version: int, going: frozenset[str]) -> None:
    table = FeatureTable.open(store.uri, version)
    needs = {*(f"_sluice/jobs/{job}.json" for job in table.records), *(store.relative(f.path) for f in table.files),
             *(f"_sluice/state/{r.state}" for r in table.records.values() if r.state)}
    if lost := sorted(folders_of(needs) & going):
        raise StoreError(f"{store.uri}: a vacuum is removing version {version} ({lost[0]}); start again on the newest "
                         "version")
