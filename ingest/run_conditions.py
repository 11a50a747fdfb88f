"""Puts a run's `RunOptions` into effect: `RunConditions` opens files, sets up the quarantine and injects faults."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sluice.common.errors import UsageError
from sluice.common.stores import SLOW, Place
from sluice.ingest.faults.injection import ON_STORES, Injection
from sluice.ingest.options import RunOptions
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.sources import Reading

if TYPE_CHECKING:
    from sluice.ingest.loader import BatchLoader


class RunConditions:
    """The conditions of one rank. `table` is the table's name without its `latency://` part."""

    def __init__(
        self,
        table: str,
        wishes: RunOptions,
        quarantine: str | os.PathLike[str],
        latency_ms: float = 0.0,
    ):
        """`quarantine` is the file that lists quarantined rows. Each request to a store takes `latency_ms` longer."""
        self.table, self._disturbed = _split_disturbance(table)
        self._wishes, self._quarantine = wishes, quarantine
        if latency_ms or (
            not self._disturbed and any(fault.kind in ON_STORES for fault in wishes.faults)
        ):
            self._disturbed = f"{self._disturbed}&latency_ms={latency_ms:g}".lstrip("&")
        self._injection: Injection | None = None
        self._files = FileOpener(disturbed=self._disturbed)

    def settings(self, reader: str | None) -> dict[str, Any]:
        """Returns a loader's settings: how it reads, what happens to bad rows, and its remote workers."""
        return {
            "reading": Reading(reader=reader, files=self._files),
            "errors": self._wishes.errors(self._quarantine),
            "workers": self._wishes.workers or None,
        }

    @contextmanager
    def inject_faults(
        self, loader: BatchLoader, record: Callable[[dict[str, Any]], None]
    ) -> Iterator[None]:
        """Returns a context in which the requested faults are injected."""
        if not self._wishes.faults:
            yield
            return
        with Injection(self._wishes.faults, loader, self._files, record) as self._injection:
            yield

    def outcome(self, loader: BatchLoader) -> dict[str, Any]:
        """Returns what to add to the last line of a program's output."""
        outcome: dict[str, Any] = {
            "memory": loader.memory(),
            "worker_restarts": loader.pipeline.restarts,
            "quarantined": loader.quarantined,
            "store": loader.store,
        }
        if self._wishes.workers:
            remote = loader.remote
            outcome |= {
                "remote": remote,
                "workers": remote["workers"],
                "retries": remote["retries"],
            }
        if self._injection is not None:
            outcome["faults"] = self._injection.outcome
        if loader.pipeline.cache is not None:
            outcome["cache"] = loader.pipeline.cache.outcome()
        return outcome


def _split_disturbance(table: str) -> tuple[str, str]:
    """Splits `latency://TABLE?HOW` into (TABLE, HOW)."""
    if Place.of(table).scheme != SLOW:
        return table, ""
    if "?" not in table:
        raise UsageError(
            f"{table}: it does not say how to disturb reads; write for instance {table}?latency_ms=50, or "
            "write latency://60ms/ABSOLUTE/PATH"
        )
    bare, _, disturbed = table.removeprefix(f"{SLOW}://").rpartition("?")
    return bare, disturbed
