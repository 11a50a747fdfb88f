"""Pins: a reader's version, which vacuum leaves alone until the pin expires or is released."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from etl.store import Store, StoreError

FOLDER = "_sluice/pins"
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
