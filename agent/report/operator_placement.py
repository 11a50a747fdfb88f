"""Which operators should move to the ETL, or to the loader, by measured costs: `placement`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sluice.agent.report.format import percent
from sluice.agent.report.run_folder import Run
from sluice.ingest.stage_spec import ONLINE

_MOST = 3  # at most so many columns are named
_NOTHING = 0.005  # of the rate: a smaller gain counts as none


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Moving one column's operators, or several columns' together, to the other side."""

    what: str
    """What is moved, such as `log I2`."""
    to_etl: bool
    gain: float
    """The gain in rows a second: 0.31 is 31 % more; below 0: fewer."""
    more_bytes: float | None
    """The growth of the table's bytes, as a share; None if that was not measured."""

    @property
    def sentence(self) -> str:
        move = f"Moving {self.what} into the ETL" if self.to_etl else f"Leaving {self.what} to the loader"
        bytes_ = "" if self.more_bytes is None else f", {_signed(self.more_bytes)} bytes"
        return f"{move}: {_signed(self.gain)} rows/s{bytes_}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds on a run's rate, as they were at its end."""

    stages: Mapping[str, tuple[float, float]]
    """Stage → (workers, useful seconds a row)."""
    online_cpu_s: float
    """Processor seconds a row of a stage that does nothing but apply operators; 0 where there is none."""
    cpu_s: float
    """Processor seconds a row of everything together; 0 if unknown."""
    cores: float
    demand: float

    @classmethod
    def of(cls, details: Mapping[str, Any], cores: float) -> Bounds:
        """Reads the bounds from a verdict's details."""
        by_cores = details.get("cores_rows_per_s")
        online = details["stages"].get(ONLINE, {"cpu_us_a_row": 0.0})
        return cls(stages={n: (m["workers"], 1e-6 * m["busy_us_a_row"]) for n, m in details["stages"].items()},
                   online_cpu_s=1e-6 * online["cpu_us_a_row"],
                   cpu_s=cores / by_cores if by_cores else 0.0, cores=cores,
                   demand=details.get("demand_rows_per_s") or math.inf)

    @property
    def without(self) -> Bounds:
        """The bounds without operators in the loader: their stage is gone, with its copies and hand-overs."""
        return replace(self, stages={n: s for n, s in self.stages.items() if n != ONLINE}, online_cpu_s=0.0,
                       cpu_s=max(0.0, self.cpu_s - self.online_cpu_s))

    def rate(self, more_s: Mapping[str, float] = MappingProxyType({})) -> float:
        """The rows a second if the operators in the loader's stages took so much longer for a row."""
        stages = dict(self.stages)
        for stage, seconds in more_s.items():
            name = next((n for n in stages if n.startswith(stage)), stage)
            workers, busy_s = stages.get(name, (1.0, 0.0))
            stages[name] = workers, busy_s + seconds
        bounds = [workers / busy for workers, busy in stages.values() if busy > 1e-12]
        cpu_s = self.cpu_s + sum(more_s.values())
        return min([self.demand, *bounds, *([self.cores / cpu_s] if self.cpu_s and cpu_s > 1e-12 else [])])


def moves(run: Run) -> list[Move]:
    """The moves that would help, the best first; none where operators or stages were not measured."""
    recorded, verdicts = run.of("operators"), run.of("verdict")
    details = (verdicts[-1].get("details") or {}) if verdicts else {}
    loader = run.of("loader")
    if not recorded or not details.get("stages") or not loader:
        return []
    bounds = Bounds.of(details, loader[-1]["cpu_quota"])
    present_rate, measured = bounds.rate(), recorded[-1]
    stored = measured["row_bytes"]

    def stage_of(operator: Mapping[str, Any]) -> str:
        return str(operator.get("stage", ONLINE))  # older runs name none: it was always this one

    def move(operators: list[Mapping[str, Any]], what: str, to_etl: bool) -> Move:
        cost: dict[str, float] = {}
        for operator in operators:
            stage, cpu_s = stage_of(operator), operator["cpu_s"]
            cost[stage] = cost.get(stage, 0.0) + (-cpu_s if to_etl else cpu_s)
        more = None
        if to_etl and stored:
            more = sum(operator["bytes_after"] - operator["bytes_before"] for operator in operators) / stored
        stay = [operator for operator in measured["loader"]
                if stage_of(operator) == ONLINE and operator not in operators]
        if to_etl and bounds.online_cpu_s and ONLINE in cost and not stay:
            del cost[ONLINE]
            new_rate = bounds.without.rate(cost)
        else:
            new_rate = bounds.rate(cost)
        return Move(what=what, to_etl=to_etl, gain=new_rate / present_rate - 1, more_bytes=more)

    suggestions = []
    for side, to_etl in (("loader", True), ("etl", False)):
        dearest = sorted(measured[side], key=lambda operator: -operator["cpu_s"])
        if len(dearest) > 1:
            suggestions.append(move(dearest, f"all {len(dearest)} columns' operators", to_etl))
        suggestions += [move([operator], f"`{operator['operators']} {operator['column']}`", to_etl)
                        for operator in dearest[:_MOST]]
    return suggestions


def placement(run: Run) -> list[str]:
    """The recommended moves as sentences."""
    suggestions = moves(run)
    to_etl = [m for m in suggestions if m.to_etl]
    if to_etl and max(m.gain for m in to_etl) < _NOTHING:
        rest = [m.sentence for m in suggestions if not m.to_etl]
        return [("The operators left to the loader cost no rows now: in the ETL they would bring nothing."), *rest]
    return [m.sentence for m in suggestions]


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{percent(abs(value))}"
