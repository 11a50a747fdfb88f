"""Chooses the ETL or the loader for the operators of each column, from measured costs: `choose`. Pure.

The choice with more rows a second wins. If both are equal, the smaller table wins. If the sizes are equal too, the ETL
wins, because it does the work once and not in each epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.agent.report.format import count, percent
from sluice.ingest.row_costs import RowCosts
from sluice.ingest.stage_spec import READ

SAME = 0.005
"""A difference up to this share of the rate, or of a row's bytes, counts as none."""


class StoredForm(Protocol):
    """One way to store a column, with its cost for a reader."""

    @property
    def left(self) -> tuple[str, ...]: ...
    @property
    def bytes(self) -> float: ...
    @property
    def decode_s(self) -> float: ...
    @property
    def apply_s(self) -> float: ...


Plan = Mapping[str, StoredForm]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The side that applies the operators of one column.

    `etl` and `loader` are the rows a second and the bytes a row of the whole table for each choice. All other columns
    are as chosen."""

    column: str
    left: tuple[str, ...]
    """The operators that are left to the loader."""
    etl: tuple[float, float]
    loader: tuple[float, float]

    @property
    def reason(self) -> str:
        """Why this side was chosen, in words."""
        (rate, size), (other_rate, other_size) = (
            (self.loader, self.etl) if self.left else (self.etl, self.loader)
        )
        where = "loader" if self.left else "ETL"
        if rate > other_rate * (1 + SAME):
            return f"{where}: {percent(rate / other_rate - 1)} more rows/s"
        if size < other_size:
            return f"{where}: equally fast, and {other_size - size:.1f} bytes a row less"
        return f"{where}: equally fast and small, and done only once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """All choices, and the predicted rate and size of the whole table."""

    choices: tuple[Choice, ...]
    plan: Plan
    rows_per_s: float
    row_bytes: float


class Prediction:
    """Predicts the rate and size of a plan, from the costs of a row in a run and from that run's plan."""

    def __init__(
        self, costs: RowCosts, now: Plan, measured_s: Mapping[str, float], row_bytes: float
    ) -> None:
        """`measured_s` are the processor seconds a row that operators took in the run, by column."""
        self._costs = costs
        self._now = now
        self._row_bytes = row_bytes
        self._scale = self._operator_factor(measured_s) or self._decoding_factor()

    def _operator_factor(self, measured_s: Mapping[str, float]) -> float:
        """Returns the ratio of the operators' cost in the run to that in the sample. 0 if the run had none of them.

        The cores of the run may have been slower or busier."""
        both = [name for name, form in self._now.items() if measured_s.get(name) and form.apply_s]
        return (
            sum(measured_s[name] for name in both) / sum(self._now[name].apply_s for name in both)
            if both
            else 0.0
        )

    def _decoding_factor(self) -> float:
        """Returns the ratio of the decoding cost in the run to that in the sample.

        The columns' share of the stage's time is assumed to be their share of the bytes."""
        sampled = sum(form.decode_s for form in self._now.values())
        share = min(1.0, sum(form.bytes for form in self._now.values()) / self._row_bytes)
        took = (
            self._costs.stages[READ.name].cpu_s * share if READ.name in self._costs.stages else 0.0
        )
        return took / sampled if took and sampled else 1.0

    def rate(self, plan: Plan) -> float:
        """Returns the predicted rows a second of a plan."""
        return self._costs.rate(self.costs_of(plan))

    def costs_of(self, plan: Plan) -> RowCosts:
        """Returns the costs of a row in the same run on a table of this plan."""
        more = sum(_takes_s(form) - _takes_s(self._now[name]) for name, form in plan.items())
        return self._costs.with_work({READ.name: self._scale * more})

    def bytes(self, plan: Plan) -> float:
        """Returns the predicted bytes a row of a plan."""
        return self._row_bytes + sum(plan[name].bytes - self._now[name].bytes for name in plan)


def _takes_s(form: StoredForm) -> float:
    """Returns the processor seconds a row of the stage that decodes row groups."""
    return form.decode_s + form.apply_s


def choose(
    costs: RowCosts,
    forms: Mapping[str, Sequence[StoredForm]],
    now: Mapping[str, tuple[str, ...]],
    *,
    measured_s: Mapping[str, float],
    row_bytes: float,
) -> Outlook:
    """Returns the choices for all columns that have several `forms`.

    The first form of each column leaves nothing to the loader. `now` maps each column to the operators that the run's
    table leaves to the loader. `row_bytes` are the bytes of a row of that table."""
    present = {
        name: next(form for form in some if form.left == now[name]) for name, some in forms.items()
    }
    prediction = Prediction(costs, present, measured_s, row_bytes)
    plan: dict[str, StoredForm] = {name: some[0] for name, some in forms.items()}
    others = [(name, form) for name, some in forms.items() for form in some[1:]]
    for name, form in others:
        if _takes_s(form) < _takes_s(plan[name]) and prediction.rate({**plan, name: form}) > (
            1 + SAME
        ) * prediction.rate(plan):
            plan[name] = form
    best = prediction.rate(plan)
    smaller = [
        (name, form) for name, form in others if plan[name].bytes - form.bytes > SAME * row_bytes
    ]
    smaller.sort(
        key=lambda pair: (
            (_takes_s(pair[1]) - _takes_s(plan[pair[0]])) / (plan[pair[0]].bytes - pair[1].bytes)
        )
    )
    for name, form in smaller:
        if (
            form.bytes < plan[name].bytes
            and prediction.rate({**plan, name: form}) >= (1 - SAME) * best
        ):
            plan[name] = form

    def either(name: str, form: StoredForm) -> tuple[float, float]:
        return prediction.rate({**plan, name: form}), prediction.bytes({**plan, name: form})

    choices = []
    for name, (etl, *left) in forms.items():
        chosen = plan[name] if plan[name].left else min(left, key=_takes_s)
        choices.append(
            Choice(
                column=name,
                left=plan[name].left,
                etl=either(name, etl),
                loader=either(name, chosen),
            )
        )
    return Outlook(
        choices=tuple(choices),
        plan=plan,
        rows_per_s=prediction.rate(plan),
        row_bytes=prediction.bytes(plan),
    )


def table_of(choices: Sequence[Choice], chains: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Returns the choices as rows of a table, after a header."""
    lines: list[tuple[str, ...]] = [
        (
            "column",
            "operators",
            "rows/s, ETL",
            "loader",
            "bytes a row, ETL",
            "loader",
            "choice and reason",
        )
    ]
    for one in choices:
        lines.append(
            (
                one.column,
                chains[one.column],
                count(one.etl[0]),
                count(one.loader[0]),
                f"{one.etl[1]:.1f}",
                f"{one.loader[1]:.1f}",
                one.reason,
            )
        )
    return lines
