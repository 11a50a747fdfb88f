"""Where a run's knobs come from and where they are kept, as `KnobOptions` say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from sluice.agent.runtime import knobs_file
from sluice.agent.runtime.core_sharing import CoreClaims, CoreSharingTunable
from sluice.agent.runtime.knob_options import KnobOptions
from sluice.agent.runtime.settled_knobs import (
    KnobContext,
    Registry,
    RegistryEntry,
    machine_fingerprint,
)
from sluice.agent.runtime.unfinished_runs import UnfinishedRuns
from sluice.agent.runtime_settings import RUNTIME
from sluice.agent.tunable import Tunable
from sluice.ingest.knobs import KnobError, Knobs
from sluice.ingest.machine import Machine


class MeasuredOperators(Protocol):
    """The operators of a table's columns, and their measured costs."""

    def costs(self) -> list[dict[str, Any]]: ...

    def others(self) -> list[dict[str, Any]]: ...


class Loading(Tunable, Protocol):
    """What `KnobMemory` needs of a loader."""

    @property
    def layout(self) -> str: ...

    @property
    def operators(self) -> MeasuredOperators: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def stored_bytes(self) -> float: ...


class KnobMemory:
    """Finds a run's first knobs and keeps its last: call `start` before it, use `observing` while it
    lasts, call `finish` after it."""

    def __init__(
        self,
        loader: Loading,
        options: KnobOptions,
        *,
        say: Callable[[str], None],
        ranks: int = 1,
        machine: Machine | None = None,
    ) -> None:
        """`ranks` is the number of ranks that share this machine."""
        self._loader = loader
        self._options = options
        self._say = say
        self._ranks = ranks
        self._registry = (
            None if options.registry is None else Registry(options.registry or None, say=say)
        )
        shared = f", shared by {ranks} ranks" if ranks > 1 else ""
        self.context = KnobContext(
            machine=machine_fingerprint(machine or Machine()) + shared,
            row_bytes=loader.row_bytes,
            schema=" ".join([loader.layout, *loader.knobs.workers]),
        )
        self._unfinished = (
            None
            if self._registry is None
            else UnfinishedRuns(self._registry.local_folder / "running", self.context.name, say=say)
        )
        self._killed: Knobs | None = None
        self._best = BestChoice()
        self.learned: Mapping[str, Any] | None = None
        """What a policy knew of these stages at the end of an earlier run; None if nothing is known."""

    def start(self) -> bool:
        """Gives the loader its first knobs; returns whether the registry had some. Raises KnobError also for a file of
        knobs that `finish` could not write."""
        if self._options.save_knobs:
            knobs_file.check_writable(self._options.save_knobs)
        loader, knobs = self._loader, self._options.knobs
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
            knobs_file.load(knobs, loader.limits)
            if knobs_file.is_file_name(knobs)
            else loader.knobs.parse(knobs)
        )
        self._killed = None if self._unfinished is None else self._unfinished.killed()
        if self._killed is None and self.learned is not None and "killed" in self.learned:
            self._killed = Knobs.from_dict(self.learned["killed"])
        elif self._killed is not None:
            self._say(
                f"an earlier run was killed with these knobs, so this one stays half-way to them: {self._killed}"
            )
        self.learned = self.with_kill(self.learned)
        return known is not None

    def with_kill(self, learned: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """What was learned, with the knobs at which an earlier run was killed if there was one."""
        if self._killed is None:
            return learned
        nothing = {"other_cpu_s": 0.0, "services": {}, "settled": False}
        return {**(learned or nothing), "killed": self._killed.to_dict()}

    @contextmanager
    def sharing(self, tunable: Tunable) -> Iterator[Tunable]:
        """Yields the tunable with the cores that other jobs of the same registry leave free. If this run is killed, the
        next run knows it."""
        if self._registry is None:
            yield tunable
            return
        assert self._unfinished is not None, "there is a registry"
        with (
            CoreClaims(self._registry.local_folder / "claims", say=self._say) as claims,
            self._unfinished.running(self._loader.knobs),
        ):
            yield CoreSharingTunable(tunable, claims, ranks=self._ranks)

    def observing(
        self, other: Callable[[dict[str, Any]], None]
    ) -> Callable[[dict[str, Any]], None]:
        """A function that takes the controller's events or metrics, notes them here, and passes them on to `other`."""

        def note_and_pass_on(line: dict[str, Any]) -> None:
            self._best.observe(line)
            if self._unfinished is not None and line.get("kind") == "decision":
                self._unfinished.note(Knobs.from_dict(line["after"]))
            other(line)

        return note_and_pass_on

    def finish(
        self,
        *,
        policy: str,
        record: Callable[[dict[str, Any]], None] | None,
        learned: Mapping[str, Any] | None = None,
    ) -> None:
        """Keeps the best knobs where the options say. A run too short to compare choices keeps the last one. `record`
        gets the costs of the table's operators; `learned` is what the policy knows by now."""
        costs, others = self._loader.operators.costs(), self._loader.operators.others()
        if record is not None and (costs or others):
            record(
                {
                    "kind": "operators",
                    "loader": costs,
                    "etl": others,
                    "row_bytes": self._loader.stored_bytes,
                }
            )
        last = self._loader.snapshot()
        seconds = last.consumer_wait_s + last.consumer_compute_s
        if not last.rows or seconds <= 0:
            return
        knobs, rows_per_s = self._best.choice() or (self._loader.knobs, last.rows / seconds)
        if self._registry is not None:
            stages = {s.name: s.busy_s / s.rows for s in last.stages if s.rows and s.busy_s > 0}
            self._registry.remember(
                RegistryEntry(
                    context=self.context,
                    knobs=knobs,
                    rows_per_s=rows_per_s,
                    stages=stages,
                    learned=self.with_kill(learned),
                )
            )
        if self._options.save_knobs:
            try:
                knobs_file.save(
                    self._options.save_knobs,
                    knobs,
                    notes=[f"{rows_per_s:,.0f} rows/s with {policy}"],
                )
            except KnobError as error:  # the run itself is done
                self._say(str(error))


class BestChoice:
    """Finds the choice with the highest rate of those that were in force for a while since machine or workload last
    changed."""

    def __init__(self) -> None:
        self._rates: dict[str, list[float]] = {}
        self._in_force = ""

    def observe(self, line: Mapping[str, Any]) -> None:
        if line.get("kind") == "occasion":
            self._in_force, self._rates = "", {}
        if line.get("kind") != "loader" or not line["rows"]:
            return  # before the first row there is nothing to compare
        knobs = json.dumps(line["knobs"], sort_keys=True)
        if (
            knobs != self._in_force
        ):  # the first metric after a change still shows the setting before
            self._in_force = knobs
            self._rates[knobs] = self._rates.pop(knobs, [])  # in the order of their last use
        else:
            self._rates[knobs].append(line["rows_per_s"])

    def choice(self) -> tuple[Knobs, float] | None:
        """The best choice and its rows a second; None if no choice was in force long enough."""
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
