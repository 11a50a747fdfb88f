"""Recommends which operators should move to the ETL or to the loader, from measured costs: `placement`."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.agent.report.format import percent
from sluice.agent.report.run_folder import Line, Run
from sluice.ingest.row_costs import RowCosts

_MOST_COLUMNS = 3
"""The most columns that are recommended for each side."""
_LEAST_GAIN = 0.005
"""A smaller gain, as a share of the rate, counts as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move of the operators of one column, or of all columns, to the other side."""

    what: str
    """The operators and the column, for example `log I2`."""
    to_etl: bool
    gain: float
    """The gain in rows a second, as a share: 0.31 is 31 % more. Below 0: fewer."""
    more_bytes: float | None
    """The growth of the table's bytes, as a share. None if that was not measured."""

    @property
    def sentence(self) -> str:
        move = (
            f"Moving {self.what} into the ETL"
            if self.to_etl
            else f"Leaving {self.what} to the loader"
        )
        bytes_ = "" if self.more_bytes is None else f", {_compared(self.more_bytes)} bytes"
        return f"{move}: {_compared(self.gain)} rows/s{bytes_}."


def moves(run: Run) -> list[Move]:
    """Returns the possible moves, for each side the operators that cost most. [] if costs were not measured."""
    recorded, costs = run.of("operators"), RowCosts.of_looks(run.of("loader"))
    if not recorded or costs is None:
        return []
    present_rate, measured = costs.rate(costs), recorded[-1]
    stored = measured["row_bytes"]

    def move(operators: list[Line], what: str, to_etl: bool) -> Move:
        more_s: dict[str, float] = {}
        for operator in operators:
            stage, cpu_s = operator["stage"], operator["cpu_s"]
            more_s[stage] = more_s.get(stage, 0.0) + (-cpu_s if to_etl else cpu_s)
        more = None
        if to_etl and stored:
            more = (
                sum(operator["bytes_after"] - operator["bytes_before"] for operator in operators)
                / stored
            )
        new_rate = costs.rate(costs.with_work(more_s))
        return Move(what=what, to_etl=to_etl, gain=new_rate / present_rate - 1, more_bytes=more)

    suggestions = []
    for side, to_etl in (("loader", True), ("etl", False)):
        dearest = sorted(measured[side], key=lambda operator: -operator["cpu_s"])
        if len(dearest) > 1:
            suggestions.append(move(dearest, f"all {len(dearest)} columns' operators", to_etl))
        suggestions += [
            move([operator], f"`{operator['operators']} {operator['column']}`", to_etl)
            for operator in dearest[:_MOST_COLUMNS]
        ]
    return suggestions


def placement(run: Run) -> list[str]:
    """Returns the recommended moves as sentences."""
    suggestions = moves(run)
    to_etl = [m for m in suggestions if m.to_etl]
    if to_etl and max(m.gain for m in to_etl) < _LEAST_GAIN:
        rest = [m.sentence for m in suggestions if not m.to_etl]
        return [
            (
                "The operators in the loader do not limit the rate. Moving them into the ETL would bring nothing."
            ),
            *rest,
        ]
    return [m.sentence for m in suggestions]


def _compared(more: float) -> str:
    return (
        f"{1 + more:.2g} times the"
        if more > 1
        else f"{'+' if more >= 0 else '−'}{percent(abs(more))}"
    )
