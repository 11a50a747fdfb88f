"""Options of a run about errors, stores and faults on purpose: `Conditions`, for programs with a command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ingest.arguments import ArgumentError
from ingest.cache import FileCache
from ingest.faults import KINDS, Fault, parse
from ingest.files import Files
from ingest.injection import ON_STORES, Injection
from ingest.knobs import parse_bytes
from ingest.loader import Loader
from ingest.quarantine import ON_ERROR, ErrorPolicy
from ingest.stacks import on_signal
from ingest.stores import Store

_LATENCY = "latency://"
_CACHE_BYTES = "10GiB"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--on-error", choices=ON_ERROR, default="raise", help="rows that fail: stop, or set them aside with weight 0 "
        "(default %(default)s)")
    add("--quarantine", metavar="FILE", default="quarantine.jsonl", help="where rows set aside are listed "
        "(default %(default)s)")
    add("--cache", metavar="DIR", help="keep what was read from remote files on this disk")
    add("--cache-limit", type=parse_bytes, metavar="BYTES", default=_CACHE_BYTES, help="and never more than this "
        "(default %(default)s)")
    add("--inject", metavar="FAULT@TIME,…", default="", help="faults on purpose, for instance "
        "kill-worker@30s,stall-store=5s@10s,corrupt@part-0: " + "; ".join(f"{n} {k.what}" for n, k in KINDS.items()))


class Conditions:
    """What `add_options` asked for. `table` is the table's name without the way it is disturbed."""

    def __init__(self, table: str, options: argparse.Namespace):
        self._disturbed = ""
        if table.startswith(_LATENCY):
            _check(table)
            table, _, self._disturbed = table.removeprefix(_LATENCY).rpartition("?")
        self.table = table
        self._faults: tuple[Fault, ...] = parse(options.inject)
        if not self._disturbed and any(fault.kind in ON_STORES for fault in self._faults):
            self._disturbed = "latency_ms=0"
        self._cache = (options.cache, options.cache_limit) if options.cache else None
        self._policy, self._quarantine = ErrorPolicy(on_error=options.on_error), options.quarantine
        self._injection: Injection | None = None
        self._files = self.files(self._cache and FileCache(*self._cache, data_set=os.path.abspath(table)
                                                           if "://" not in table else table))

    def files(self, cache: FileCache | None = None) -> Files:
        """Another way to the same files, for whoever reads beside the loader."""
        return Files(disturbed=self._disturbed, cache=cache)

    def for_loader(self) -> dict[str, Any]:
        """Arguments of a Loader."""
        return {"errors": self._policy, "quarantine": self._quarantine, "files": self._files}

    @contextmanager
    def around(self, loader: Loader, record: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Faults happen while it lasts, and SIGUSR1 prints stacks. In the main thread."""
        with ExitStack() as stack:
            stack.enter_context(on_signal(loader.stacks))
            if self._faults:
                self._injection = stack.enter_context(Injection(self._faults, loader, self._files, record))
            yield

    def outcome(self, loader: Loader) -> dict[str, Any]:
        """For the last line of a program's output."""
        found: dict[str, Any] = {"memory": loader.memory(), "worker_restarts": loader.worker_restarts,
                                 "quarantined": loader.quarantined, "store": loader.store}
        if self._injection is not None:
            injector = self._injection.injector
            found["faults"] = {"happened": injector.happened, "missed": injector.missed}
        return found


def _check(uri: str) -> None:
    if "?" not in uri:
        raise ArgumentError(f"{uri}: say how it shall be disturbed, for instance {uri}?latency_ms=50")
    try:
        Store.at(uri).close()
    except ValueError as error:
        raise ArgumentError(str(error)) from None
