"""Finds a run's first knobs and keeps its best ones, as the `LoaderOptions` ask: `KnobMemory`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sluice.agent.runtime.loader_options import LoaderOptions
from sluice.agent.runtime.saved_state import (
    KnobContext,
    Registry,
    SavedState,
    check_writable,
    is_file_name,
    machine_fingerprint,
)
from sluice.agent.runtime_settings import RUNTIME
from sluice.agent.tunable import Tunable
from sluice.ingest.knobs import Knobs
from sluice.ingest.machine import Machine


class Loading(Tunable, Protocol):
    """The part of a loader that `KnobMemory` uses."""

    @property
    def layout(self) -> str: ...

    @property
    def row_bytes(self) -> int: ...


class KnobMemory:
    """Finds a run's first knobs and keeps its best ones.

    Call `start` before the run, use `observing` during the run, and call `finish` after it."""

    def __init__(
        self,
        loader: Loading,
        options: LoaderOptions,
        *,
        say: Callable[[str], None],
        ranks: int = 1,
        machine: Machine | None = None,
    ) -> None:
        """`ranks` is the number of ranks that share this machine."""
        self._loader = loader
        self._options = options
        self._say = say
        self._registry = (
            None if options.registry is None else Registry(options.registry or None, say=say)
        )
        shared = f", shared by {ranks} ranks" if ranks > 1 else ""
        self.context = KnobContext(
            machine=machine_fingerprint(machine or Machine()) + shared,
            row_bytes=loader.row_bytes,
            schema=" ".join([loader.layout, *loader.knobs.workers]),
        )
        self._best = BestChoice()
        self.learned: Mapping[str, Any] | None = None
        """What the policy of an earlier run had learned about these stages. None: nothing."""

    def start(self) -> bool:
        """Applies the first knobs to the loader. Returns whether the registry had some.

        Raises KnobError for knobs that do not fit, and for a file that `finish` could not write."""
        if self._options.save_knobs:
            check_writable(self._options.save_knobs)
        loader = self._loader
        knobs = self._options.knobs
        known = (
            None if self._registry is None else self._registry.recall(self.context, loader.limits)
        )
        if known is not None:
            self._say(
                f"from the registry, where {known.rows_per_s:,.0f} rows/s are expected: {known.knobs}"
            )
            loader.apply(known.knobs)
            self.learned = known.learned
        loader.apply(
            SavedState.load(knobs, loader.limits).knobs
            if is_file_name(knobs)
            else loader.knobs.parse(knobs, loader.limits.fetch_bytes)
        )
        return known is not None

    def observing(
        self, other: Callable[[dict[str, Any]], None]
    ) -> Callable[[dict[str, Any]], None]:
        """Returns a function that notes an event or a metric of the controller, and passes it on to `other`."""

        def note_and_pass_on(line: dict[str, Any]) -> None:
            self._best.observe(line)
            other(line)

        return note_and_pass_on

    def finish(self, *, policy: str, learned: Mapping[str, Any] | None = None) -> None:
        """Keeps the best knobs in the registry and in the file of the options.

        A run too short to compare choices keeps its last knobs. `learned` is what the policy knows now."""
        last = self._loader.snapshot()
        seconds = last.consumer_wait_s + last.consumer_compute_s
        if not last.rows or seconds <= 0:
            return
        knobs, rows_per_s = self._best.choice() or (self._loader.knobs, last.rows / seconds)
        state = SavedState(
            context=self.context,
            knobs=knobs,
            rows_per_s=rows_per_s,
            policy=policy,
            learned=learned,
        )
        if self._registry is not None:
            self._registry.remember(state)
        if self._options.save_knobs:
            try:
                state.save(self._options.save_knobs)
            except OSError as error:  # The run itself is over, so this is no reason to fail.
                path = self._options.save_knobs
                self._say(f"{path}: the knobs cannot be written: {error.strerror}")


class BestChoice:
    """Finds the knobs with the highest rate since the machine or the workload last changed.

    Only knobs that were in force for several looks count."""

    def __init__(self) -> None:
        # Knobs as JSON → their rates, in the order in which the knobs were last applied.
        self._rates: dict[str, list[float]] = {}
        self._in_force = ""

    def observe(self, line: Mapping[str, Any]) -> None:
        """Takes in one event or metric of the controller."""
        if line.get("kind") == "incident":
            self._in_force = ""
            self._rates = {}
        if line.get("kind") != "loader" or not line["rows"]:
            return  # There is no rate before the first row.
        knobs = json.dumps(line["knobs"], sort_keys=True)
        if knobs != self._in_force:
            # The first metric after a change still shows the old knobs, so it does not count.
            self._in_force = knobs
            self._rates[knobs] = self._rates.pop(knobs, [])
        else:
            self._rates[knobs].append(line["rows_per_s"])

    def choice(self) -> tuple[Knobs, float] | None:
        """Returns the best knobs and their rows a second. None if no knobs were in force long enough."""
        means = {
            k: sum(rates) / len(rates)
            for k, rates in self._rates.items()
            if len(rates) >= RUNTIME.compared_looks
        }
        top = max(means.values(), default=0.0)
        if top <= 0:
            return None
        knobs = next(k for k in reversed(means) if means[k] >= RUNTIME.as_good_share * top)
        return Knobs.from_dict(json.loads(knobs)), means[knobs]
