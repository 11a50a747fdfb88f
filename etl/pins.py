"""Pins: a reader's version, which vacuum leaves alone until the pin expires or is released; and `Removal`, by which
readers hear what a vacuum has begun to remove.

A vacuum says what it removes, and then looks for pins; a reader pins, and then looks for what is being removed. So at
least one of the two sees the other, whatever comes between.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from etl.store import Store, StoreError

FOLDER = "_sluice/pins"
_REMOVALS = "_sluice/vacuums"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One reader's claim. Times are seconds since 1970, given by the caller."""

    name: str
    """Of the reader: a run's name, for instance. Taking a pin again renews it."""
    version: int
    expires: float

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise StoreError(f"pin name {self.name!r}: must be 1 to 100 letters, digits, '.', '_' and '-'")

    def save(self, store: Store) -> None:
        """Takes the pin, or renews it; a reader renews well before it expires."""
        store.write_json(f"{FOLDER}/{self.name}.json", {"version": self.version, "expires": self.expires})

    def release(self, store: Store) -> None:
        store.remove(f"{FOLDER}/{self.name}.json")


def pins(store: Store, now: float) -> tuple[Pin, ...]:
    """Those that have not expired. One that cannot be read is an error: to ignore it could cost a reader its files."""
    found = []
    for path in store.files(FOLDER):
        if not path.endswith(".json"):
            continue
        try:
            about = json.loads(store.read(path))
            pin = Pin(name=path.rsplit("/", 1)[-1][:-5], version=int(about["version"]),
                      expires=float(about["expires"]))
        except FileNotFoundError:  # released just now
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{store.url(path)}: a pin that cannot be read ({error}); remove it if nobody reads by it"
                             ) from None
        if pin.expires > now:
            found.append(pin)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What a vacuum is about to remove, by the folders of jobs and states that lose something."""

    folders: frozenset[str]
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def of(cls, gone: Iterable[str], kept: Iterable[str]) -> Removal:
        """What lies beside a kept file may go without a loss."""
        return cls(folders=folders_of(gone) - folders_of(kept))

    def begin(self, store: Store) -> None:
        store.write_json(self._path, {"folders": sorted(self.folders)})

    def end(self, store: Store) -> None:
        store.remove(self._path)

    @property
    def _path(self) -> str:
        return f"{_REMOVALS}/{self.name}.json"


def being_removed(store: Store) -> frozenset[str]:
    """What vacuums at work remove; also one that was killed, until the next one ends."""
    found: set[str] = set()
    for path in removals(store):
        try:
            found.update(map(str, store.read_json(path)["folders"]))
        except FileNotFoundError:  # it has ended just now
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{store.url(path)}: what a vacuum removes cannot be read ({error}); remove this file if "
                             "no vacuum is at work") from None
    return frozenset(found)


def removals(store: Store) -> tuple[str, ...]:
    """The files in which vacuums say what they remove."""
    return tuple(path for path in store.files(_REMOVALS) if path.endswith(".json"))


def folders_of(paths: Iterable[str]) -> frozenset[str]:
    """Of a job or a state: `data/JOB`, `_sluice/state/HASH`; a record stands for itself."""
    return frozenset("/".join(path.split("/")[:2 if path.startswith("data/") else 3]) for path in paths)
