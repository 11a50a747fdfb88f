"""A scenario: a simulated pipeline, and its changes over time.

`scenario_json` reads a scenario from a file. `random_pipelines` makes random ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.agent.lab.simulator.physics import (
    Consumer,
    SimMachine,
    SimStage,
    TrueCosts,
    memory_need,
)
from sluice.common.errors import UsageError
from sluice.common.number_checks import is_number
from sluice.ingest.knobs import BACKENDS, KnobError, Knobs, Limits
from sluice.ingest.stage_spec import limits_of

_STEP_S = 0.25  # A gradual change takes a new value this often.


class ScenarioError(UsageError):
    """An invalid scenario. The message starts with the path of the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledChange:
    """A change of the pipeline. From the time `at` on, `key` moves to `value` within `over` seconds."""

    at: float
    key: str
    value: float
    over: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A pipeline and its changes. `truth_at(seconds)` returns its true costs at a moment."""

    name: str
    about: str = ""
    seconds: float = 120.0
    machine: SimMachine = field(default_factory=SimMachine)
    consumer: Consumer = field(default_factory=Consumer)
    stages: tuple[SimStage, ...]
    start: Mapping[str, int] = field(default_factory=dict)
    """Workers at the start. Every other stage starts with one."""
    changes: tuple[ScheduledChange, ...] = ()

    def __post_init__(self) -> None:
        if len({s.name for s in self.stages}) != len(self.stages) or not self.stages:
            raise ScenarioError(
                f"stages: {[s.name for s in self.stages]} are not one or more different names"
            )
        if not is_number(self.seconds) or not self.seconds:
            raise ScenarioError(f"seconds: {self.seconds!r} is not a positive number of seconds")
        for i, change in enumerate(self.changes):
            if change.at < 0 or change.over < 0:
                raise ScenarioError(
                    f"changes[{i}].at: {change.at:g} (over {change.over:g}) is before the start"
                )
            truth = self.truth_at(change.at + change.over)
            self._check_memory(truth, f"changes[{i}].{change.key}")
        self._check_memory(self.truth_at(0.0), "machine.memory_limit")
        try:
            self.limits.check(self.first_knobs)
        except KnobError as error:
            raise ScenarioError(f"start: {error}") from error

    def _check_memory(self, truth: TrueCosts, path: str) -> None:
        """Raises ScenarioError if the memory is too small for one item in each stage."""
        count = len(self.stages)
        least = memory_need(
            truth,
            [1.0] * count,
            [s.backends[0] for s in truth.stages],
            sum(
                max(s.held_bytes, s.bytes_per_row * truth.consumer.batch_rows * (i == count - 1))
                for i, s in enumerate(truth.stages)
            ),
        )
        if least > 0.97 * truth.machine.memory_limit:
            raise ScenarioError(
                f"{path}: a memory limit of {truth.machine.memory_limit:.0f} bytes is too small for "
                f"one item in each stage; {math.ceil(least / 0.97)} would do"
            )

    def truth_at(self, seconds: float) -> TrueCosts:
        """Returns the true costs at a moment. The object is the same until something changes."""
        done = tuple(
            min(1.0, max(0.0, (math.floor((seconds - c.at) / _STEP_S + 1e-6) * _STEP_S) / c.over))
            if c.over
            else float(seconds >= c.at - 1e-9)
            for c in self.changes
        )
        if done not in self._truths:
            self._truths[done] = self._truth(done)
        return self._truths[done]

    @functools.cached_property
    def _truths(self) -> dict[tuple[float, ...], TrueCosts]:
        return {}

    def _truth(self, done: tuple[float, ...]) -> TrueCosts:
        """Returns the true costs after these shares of the changes."""
        values: dict[str, float] = {}
        for change, share in zip(self.changes, done, strict=True):
            if share > 0:
                before = values.get(change.key, value_of(self, change.key))
                # The change is geometric if possible: a growing cost grows by the same share every second.
                between = (
                    before * (change.value / before) ** share
                    if before > 0 and change.value > 0
                    else (before + (change.value - before) * share)
                )
                values[change.key] = change.value if share == 1 else between
        parts: dict[str, dict[str, Any]] = {}
        for path, value in values.items():
            owner, _, name = path.rpartition(".")
            parts.setdefault(owner, {})[name] = int(value) if name == "batch_rows" else value
        return TrueCosts(
            dataclasses.replace(self.machine, **parts.get("machine", {})),
            tuple(
                dataclasses.replace(s, **own) if (own := parts.get(f"stages.{s.name}")) else s
                for s in self.stages
            ),
            dataclasses.replace(self.consumer, **parts.get("consumer", {})),
        )

    @functools.cached_property
    def limits(self) -> Limits:
        return dataclasses.replace(
            limits_of(self.stages, self._host_cores, BACKENDS),
            read_ahead_bytes=(2**20, 2**36),
            prefetch_bytes=(2**20, 2**36),
        )

    @property
    def _host_cores(self) -> int:
        """The most cores that the machine ever has."""
        return math.ceil(
            max(
                [self.machine.host_cores, self.machine.cores]
                + [
                    c.value
                    for c in self.changes
                    if c.key in ("machine.cores", "machine.host_cores")
                ]
            )
        )

    @functools.cached_property
    def first_knobs(self) -> Knobs:
        """The knobs at the start: the stages' first values, with the workers of `start`."""
        return Knobs(
            workers={s.name: s.first_workers(self._host_cores) for s in self.stages}
            | dict(self.start),
            backend={s.name: s.backends[0] for s in self.stages},
        )


def value_of(scenario: Scenario, key: str) -> float:
    """Returns the number at a key such as `stages.decode.cost_s` or `machine.cores`."""
    owner, _, name = key.rpartition(".")
    if owner in ("machine", "consumer"):
        return float(getattr(getattr(scenario, owner), name))
    return float(getattr(next(s for s in scenario.stages if f"stages.{s.name}" == owner), name))
