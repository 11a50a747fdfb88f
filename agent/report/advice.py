"""Advice from a run's last verdict: what bounds the rate, what more resources would bring, how certain that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.agent.report.format import count, percent
from sluice.agent.report.incidents import measured
from sluice.agent.report.operator_placement import placement
from sluice.agent.report.run_folder import Run

_SAME = 0.05  # of the rate: a smaller difference counts as none


def advice(run: Run, rate: float | None) -> list[str]:
    """The advice as sentences; none if the run ended without a verdict. `rate` is the run's, in its last third: what
    other resources would bring is told in parts of it."""
    verdicts = run.of("verdict")
    if not verdicts:
        return []
    details, text = verdicts[-1].get("details") or {}, verdicts[-1].get("text") or "nothing was said"
    proposed = any((proposal.get("reason") or {}).get("text") == text for proposal in run.of("proposal"))
    return [f"At its last looks the agent said: {text}.", *_cases(details.get("what_if") or {}, proposed, rate),
            *placement(run), *_models(details.get("stages") or {}), *_prediction(run)]


def _cases(cases: Mapping[str, Any], proposed: bool, rate: float | None) -> list[str]:
    """What other resources would bring beside the setting in force, or beside one that was only `proposed`."""
    present_rate = (cases.get("as it is") or {}).get("rows_per_s")
    if not present_rate:
        return []
    lines = []
    for name, case in cases.items():
        times = case["rows_per_s"] / present_rate
        if name != "as it is":
            brings = "the same" if abs(times - 1) <= _SAME else f"{times:.2g} times the rows"
            rows = "" if proposed or rate is None else f", {count(times * rate)} rows/s"
            lines.append(f"With {'that and ' if proposed else ''}{name}: {brings}{rows} "
                         f"({', '.join(f'{s} {n}' for s, n in case['workers'].items())}).")
    return lines


def _models(stages: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, model in stages.items():
        old = f"; last seen {model['age']:.0f} looks ago" if model["age"] > 1 else ""
        lines.append(f"{name}: {model['busy_us_a_row']:.3g} µs a row and worker at {model['workers']:.0f}, "
                     f"{model['cpu_us_a_row']:.3g} of it on a core, ± {percent(model['spread'])}; expectations were "
                     f"{_off(model['residual'])} off{old}.")
    return lines


def _prediction(run: Run) -> list[str]:
    errors = sorted(abs(one.effect["prediction_error"]) for one in measured(run)
                    if one.effect is not None and one.disturbance is None
                    and one.effect.get("prediction_error") is not None)
    if not errors:
        return []
    changes = "one change" if len(errors) == 1 else f"{len(errors)} changes"
    return [(f"What was predicted of {changes} was {_off(errors[len(errors) // 2])} off in the middle, "
             f"{_off(errors[-1])} at worst.")]


def _off(share: float) -> str:
    return percent(share) if share <= 1 else f"a factor of {1 + share:.2g}"
