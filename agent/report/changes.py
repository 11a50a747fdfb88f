"""The changes of a run's knobs: why each was made, and what it brought: `find_changes`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from sluice.agent.report.format import count, moved, percent, reason_of, times
from sluice.agent.report.incidents import NO_STALL, find_causes
from sluice.agent.report.run_folder import Line, Run

_HIDDEN_S: Mapping[str, float] = {"workload": 10.0, "store": 10.0}
"""Buffers may hide an incident's cost for this time, so the rate before a decision may be that of full buffers."""
SAME_SHARE = 0.05
"""A difference of rates up to this share counts as none."""
FASTER = "faster"
NOT_COMPARED = {"not measured", "not comparable", "at the start"}
"""Results of a change whose gain is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A decision and its measured effect."""

    at: float
    number: int
    moves: str
    """The knobs that were changed: `decode 1 → 4`."""
    reason: str
    effect: str
    """`4.1 times the rows (18.5 k → 76.5 k rows/s), stall 100 % → 93 %`, or a note that nothing was measured."""
    result: str
    """`faster`, `slower` or `as before`. `trainer faster` if more rows came although the trainer had not waited.
    Otherwise why there is no result."""
    error: float | None
    """The error of the predicted rate, as a share of it. None if it was not measured."""


def find_changes(run: Run) -> list[Change]:
    """Returns all decisions with their effects, in order.

    A resumed run counts its decisions from 1 again. So an effect belongs to the last decision of its number."""
    decisions = run.of("decision")
    effects = run.of("effect")
    causes = find_causes(run)
    changes = []
    for number, decision in enumerate(decisions, 1):
        at, sequence = float(decision["at"]), decision.get("sequence")
        later = (d["at"] for d in decisions[number:] if d.get("sequence") == sequence)
        until = next(later, inf)
        effect = next(
            (e for e in effects if e.get("sequence") == sequence and at <= e["at"] <= until), None
        )
        error = None
        if effect is None:
            result = text = "not measured"
        elif meanwhile := [
            cause.text
            for cause in causes
            if at - _HIDDEN_S.get(cause.what, 0.0) < cause.at <= effect["at"]
        ]:
            result = "not comparable"
            text = f"not comparable with before, as meanwhile {meanwhile[0]}"
        else:
            result, text = _read_effect(effect)
            error = effect.get("prediction_error")
        changes.append(
            Change(
                at=at,
                number=number,
                moves=moved(decision),
                reason=reason_of(decision),
                effect=text,
                result=result,
                error=error,
            )
        )
    return changes


def _read_effect(effect: Line) -> tuple[str, str]:
    """Returns the result of a change in a word or two, and its effect with rates and the prediction's error."""
    before, after = effect.get("rows_per_s_before"), effect["rows_per_s_after"]
    error = effect.get("prediction_error")
    if error is None:
        off = ""
    elif error > 1:
        off = f", {times(1 + error)} times what was predicted"
    else:
        off = f", {percent(abs(error))} {'more' if error > 0 else 'less'} than predicted"
    stall = percent(effect["stall_after"])
    if not before:
        text = f"{count(after)} rows/s from then on, stall {stall}{off}; before it the pipeline only started"
        return "at the start", text
    gain = after / before
    text = (
        f"{times(gain)} times the rows ({count(before)} → {count(after)} rows/s), "
        f"stall {percent(effect['stall_before'])} → {stall}{off}"
    )
    if abs(gain - 1) <= SAME_SHARE:
        return "as before", text
    if gain < 1:
        return "slower", text
    # If the trainer did not wait, faster input cannot be the cause.
    return FASTER if effect["stall_before"] > NO_STALL else "trainer faster", text
