"""A reader's pin for as long as it reads: `Hold` takes it, renews it, and releases it at the end."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable

from etl.pins import Pin
from etl.store import Store

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
        """Pins this version, instead of the one that was held."""
        with self._lock:
            before, self._held = self._held, (Store(uri), version)
            self._save()
            if before is not None and before[0].uri != self._held[0].uri:
                self._release(before[0])

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

    def _save(self) -> None:
        if self._held is None:
            return
        store, version = self._held
        try:
            Pin(name=self._pin, version=version, expires=self._clock() + LASTS_S).save(store)
        except OSError as error:
            self._tell(f"{store.uri}: version {version} cannot be pinned ({error.strerror or error}), so a vacuum may "
                       "remove it while it is read")

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
