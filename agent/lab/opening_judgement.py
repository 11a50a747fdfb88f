"""Compares the learned initial setting with the planner alone: `judge` → `OpeningTable`.

Both run on the same pipelines with the same seeds. The metric and the cases are fixed before the run. The metric is the
rows of the first ten seconds and of the whole run, as shares of the oracle's rows. The pipelines belong to families
that the training does not use. The planner continues after the initial setting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sluice.agent.lab.simulator.random_pipelines import pipeline
from sluice.agent.lab.simulator.rollout import reference, run
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.learn.imitation import mean_between
from sluice.agent.tunable import Policy

_START = 10
_BACK, _IN_A_ROW = 0.95, 3
_FRESH = 3_000
"""Pipelines with lower numbers were used during development."""
_WORSE = 0.01
"""A pipeline that loses more than this share of its rows counts as worse."""
_MOST_WORSE, _MOST_LOST = 0.08, 0.005
"""The largest share of worse pipelines, and the largest mean loss of rows, at the lower end of its confidence
interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline and its seed."""

    scenario: Scenario
    seed: int


def cases(split: str, count: int) -> list[Case]:
    return [
        Case(scenario=pipeline(split, number), seed=number)
        for number in range(_FRESH, _FRESH + count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The result of one policy in one case, as shares of the oracle's rows."""

    start: float
    """The share of the first ten seconds."""
    whole: float
    back_s: int
    """Seconds until three seconds in a row together reach 0.95."""
    killed: bool


def course(case: Case, policy: Policy, best: Sequence[float]) -> Course:
    """Runs a policy in a case. `best` are the oracle's rates, one for each second."""
    outcome = run(case.scenario, policy, seed=case.seed)
    each = outcome.rates
    back = next(
        (
            i
            for i in range(len(best) - _IN_A_ROW + 1)
            if sum(each[i : i + _IN_A_ROW]) >= _BACK * sum(best[i : i + _IN_A_ROW])
        ),
        len(best),
    )
    return Course(
        start=sum(each[:_START]) / max(1e-9, sum(best[:_START])),
        whole=sum(each) / max(1e-9, sum(best)),
        back_s=back,
        killed=outcome.killed,
    )


@dataclass(frozen=True, slots=True)
class OpeningTable:
    """The courses of all cases, with and without the learned policy."""

    opened: tuple[Course, ...]
    planner: tuple[Course, ...]

    def gain(self, name: str) -> tuple[float, float, float]:
        """Returns the mean gain, and its 95 % confidence interval over draws of pipelines."""
        gains = np.array(
            [
                getattr(a, name) - getattr(b, name)
                for a, b in zip(self.opened, self.planner, strict=True)
            ]
        )
        return mean_between(gains)

    @property
    def worse(self) -> float:
        """The share of pipelines that lose rows with the learned policy."""
        return float(
            np.mean(
                [a.whole < b.whole - _WORSE for a, b in zip(self.opened, self.planner, strict=True)]
            )
        )

    @property
    def ships(self) -> bool:
        """Whether the policy is not inferior over the whole run, and has no more killed pipelines."""
        return (
            self.gain("whole")[1] >= -_MOST_LOST
            and self.worse <= _MOST_WORSE
            and sum(c.killed for c in self.opened) <= sum(c.killed for c in self.planner)
        )

    def verdict(self) -> str:
        return (
            "not inferior over the whole run: it may ship"
            if self.ships
            else "may be inferior over the whole run: it does not ship"
        )

    def to_dict(self) -> dict[str, Any]:
        def summarize(courses: tuple[Course, ...]) -> dict[str, Any]:
            figures: dict[str, Any] = {
                name: {
                    "mean": round(float(np.mean(values)), 4),
                    "median": round(float(np.median(values)), 4),
                    "p5": round(float(np.quantile(values, 0.05)), 4),
                }
                for name in ("start", "whole")
                if (values := [getattr(c, name) for c in courses])
            }
            return {
                **figures,
                "back_s": float(np.median([c.back_s for c in courses])),
                "kills": sum(c.killed for c in courses),
            }

        return {
            "pipelines": len(self.opened),
            "opened": summarize(self.opened),
            "planner": summarize(self.planner),
            "gain_start": [round(g, 4) for g in self.gain("start")],
            "gain_whole": [round(g, 4) for g in self.gain("whole")],
            "worse": round(self.worse, 4),
        }

    def text(self) -> str:
        figures = self.to_dict()
        lines = [
            f"{len(self.opened)} pipelines; shares of the oracle's rows: median/mean/5th percentile",
            f"{'':<10}{'first 10 s':>18}{'whole run':>18}{'95 % after':>12}{'kills':>7}",
        ]
        for name in ("planner", "opened"):
            one = figures[name]
            cells = [
                "/".join(f"{one[part][kind]:.3f}" for kind in ("median", "mean", "p5"))
                for part in ("start", "whole")
            ]
            lines.append(
                f"{name:<10}{cells[0]:>18}{cells[1]:>18}{one['back_s']:>10.0f} s{one['kills']:>7}"
            )
        for name, title in (("start", "first 10 s"), ("whole", "whole run")):
            mean, low, high = (100 * g for g in self.gain(name))
            lines.append(f"{title}: {mean:+.1f} points ({low:+.1f} to {high:+.1f})")
        return "\n".join(
            [*lines, f"{100 * self.worse:.0f} % of the pipelines lose more than 1 % of their rows"]
        )


def judge(
    opened: Callable[[], Policy], planner: Callable[[], Policy], some: Sequence[Case]
) -> OpeningTable:
    """Runs both in all cases. Each run makes its own policy."""
    pairs = []
    for case in some:
        best = reference(case.scenario, seed=case.seed).rates
        pairs.append((course(case, opened(), best), course(case, planner(), best)))
    return OpeningTable(*(tuple(courses) for courses in zip(*pairs, strict=True)))
