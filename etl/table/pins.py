"""`Pin`: vacuum keeps a pinned version until the pin expires or is released. `Removal` shows readers what a vacuum is
removing.

A vacuum first writes what it removes, and then looks for pins. A reader first pins, and then looks for removals. So at
least one of them sees the other.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sluice.common.stores import StoreError
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable

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
    found = []
    for path in store.files(FOLDER):
        if not path.endswith(".json"):
            continue
        try:
            about = json.loads(store.read(path))
            pin = Pin(
                name=path.rsplit("/", 1)[-1][:-5],
                version=int(about["version"]),
                expires=float(about["expires"]),
            )
        except FileNotFoundError:  # the pin was released just now
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{store.url(path)}: a pin that cannot be read ({error}); remove the file if no reader uses it"
            ) from None
        if pin.expires > now:
            found.append(pin)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What a vacuum will remove: the folders of the jobs and states that lose files."""

    folders: frozenset[str]
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def of(cls, removed: Iterable[str], remaining: Iterable[str]) -> Removal:
        """Describes the removal of these files. Leaves out folders that also hold a kept file."""
        return cls(folders=folders_of(removed) - folders_of(remaining))

    def begin(self, store: TableStore) -> None:
        store.write_json(self._path, {"folders": sorted(self.folders)})

    def end(self, store: TableStore) -> None:
        store.remove(self._path)

    @property
    def _path(self) -> str:
        return f"{_REMOVALS}/{self.name}.json"


def being_removed(store: TableStore) -> frozenset[str]:
    """Returns the folders that running vacuums remove. Includes those of a killed vacuum until the next vacuum ends."""
    found: set[str] = set()
    for path in removals(store):
        try:
            found.update(map(str, store.read_json(path)["folders"]))
        except FileNotFoundError:  # the vacuum has ended just now
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{store.url(path)}: a vacuum's list of removals cannot be read ({error}); remove this file if "
                "no vacuum is running"
            ) from None
    return frozenset(found)


def removals(store: TableStore) -> tuple[str, ...]:
    """Returns the files in which vacuums list what they remove."""
    return tuple(path for path in store.files(_REMOVALS) if path.endswith(".json"))


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
        self._pin = f"{re.sub('[^A-Za-z0-9._-]', '-', reader)[:80]}-{uuid.uuid4().hex[:8]}"
        self._say = say
        self._clock = clock
        self._every_s = every_s
        self._held: tuple[TableStore, int] | None = None
        self._has_warned = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._renew_until_ended, name="sluice-pin", daemon=True
        )

    def take(self, uri: str, version: int) -> None:
        """Pins this version instead of the one before. Raises StoreError if a vacuum is removing it."""
        with self._lock:
            before, self._held = self._held, (TableStore(uri), version)
            pinned = self._save()
            if before is not None and before[0].uri != self._held[0].uri:
                self._release(before[0])
            if pinned and (going := being_removed(self._held[0])):
                _check_removal(self._held[0], version, going)

    def __enter__(self) -> PinKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.release()

    def release(self) -> None:
        """Removes the pin. Any thread may call it, for a process that ends without leaving the context."""
        if self._held is not None:
            self._release(self._held[0])

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._lock:
                self._save()

    def _save(self) -> bool:
        """Saves the pin. Returns whether the version is pinned now."""
        if self._held is None:
            return False
        store, version = self._held
        try:
            Pin(name=self._pin, version=version, expires=self._clock() + LASTS_S).save(store)
        except OSError as error:
            self._warn(
                f"{store.uri}: version {version} cannot be pinned ({error.strerror or error}), so a vacuum may "
                "remove it while it is read"
            )
            return False
        return True

    def _release(self, store: TableStore) -> None:
        try:
            Pin(name=self._pin, version=0, expires=0).release(store)
        except OSError as error:
            self._warn(
                f"{store.uri}: the pin {self._pin} cannot be removed ({error.strerror or error}); it expires "
                f"within {LASTS_S:g} s"
            )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(text)


def _check_removal(store: TableStore, version: int, going: frozenset[str]) -> None:
    table = FeatureTable.open(store.uri, version)
    needs = {
        *(f"_sluice/jobs/{job}.json" for job in table.records),
        *(store.relative(f.path) for f in table.files),
        *(f"_sluice/state/{r.state}" for r in table.records.values() if r.state),
    }
    if lost := sorted(folders_of(needs) & going):
        raise StoreError(
            f"{store.uri}: a vacuum is removing version {version} ({lost[0]}); start again on the newest "
            "version"
        )
