"""Makes tables and figures from the results of policies: `Row` is the result of one policy in one scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_TITLES = {
    "score": "score (rows over the whole scenario ÷ the clairvoyant's): median ± half the spread; held out: median/5 %",
    "end": "end score (rows in the last fifth ÷ the clairvoyant's)",
}
_GROUPS = {"held out": "held out, at rest", "changing": "held out, changing"}
_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one policy in one scenario with one seed."""

    scenario: str
    family: str
    policy: str
    seed: int
    score: float
    end: float
    start: float
    """The score of the first ten seconds."""
    killed: bool


def table(rows: Sequence[Row], policies: Sequence[str]) -> str:
    """Returns the table of policies and scenarios, as text.

    A cell has the median and the spread over the seeds. For a family of pipelines, it has the median and the 5th
    percentile. A dagger stands for runs that were killed for memory."""
    names = list(
        dict.fromkeys(
            r.scenario for r in sorted(rows, key=lambda r: r.scenario) if r.family == "scenario"
        )
    )
    groups = [(n, [r for r in rows if r.scenario == n]) for n in names]
    groups += [
        (
            f"{title} ({len({r.scenario for r in rows if r.family == f})})",
            [r for r in rows if r.family == f],
        )
        for f, title in _GROUPS.items()
        if any(r.family == f for r in rows)
    ]
    width = max(len(p) for p in policies) + 2
    short = [f"{i + 1:>2}" for i in range(len(groups))]
    lines = [f"{s}  {name}" for s, (name, _) in zip(short, groups, strict=True)]
    for cells, title in _TITLES.items():
        lines += ["", title, " " * width + "".join(f"{s:>11}" for s in short)]
        for policy in policies:
            line = f"{policy:<{width}}"
            for _, group in groups:
                values = [getattr(r, cells) for r in group if r.policy == policy]
                text = (
                    f"{np.median(values):.2f}/{np.percentile(values, 5):.2f}"
                    if group[0].family != "scenario"
                    else f"{np.median(values):.3f}±{(max(values) - min(values)) / 2:.2f}"
                )
                killed = any(r.killed for r in group if r.policy == policy)
                line += f"{text + '†' * killed:>11}"
            lines.append(line)
    return "\n".join(lines)


def summary(rows: Sequence[Row], policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the figures of each policy for the program's last line."""
    figures_of = {}
    parts = {
        "scenarios": [r for r in rows if r.family == "scenario"],
        "held out": [r for r in rows if r.family != "scenario"],
    }
    for policy in policies:
        own = [r for r in rows if r.policy == policy]
        figures_of[policy] = {
            **_spread(own),
            "end_median": round_(np.median([r.end for r in own])),
            "groups": {
                name: {
                    **_spread([r for r in some if r.policy == policy]),
                    "behind": lead_over(some, policies[0], policy),
                }
                for name, some in parts.items()
                if some
            },
        }
    return figures_of


def _spread(rows: Sequence[Row]) -> dict[str, Any]:
    scores = [r.score for r in rows]
    return {
        "mean": round_(np.mean(scores)),
        "median": round_(np.median(scores)),
        "p5": round_(np.percentile(scores, 5)),
        "start": round_(np.mean([r.start for r in rows])),
        "kills": sum(r.killed for r in rows),
    }


def comparison(rows: Sequence[Row], policies: Sequence[str]) -> str:
    """Returns the table for the documentation, in Markdown: each policy on the scenarios and on the held-out pipelines.

    It also says by how many points the first policy of the list is better."""
    figures = summary(rows, policies)
    groups = []
    for name in ("scenarios", "held out"):
        some = [r for r in rows if (r.family == "scenario") == (name == "scenarios")]
        if some:
            seeds = len({r.seed for r in some}) if name == "scenarios" else 1
            groups.append(
                (
                    name,
                    f"{len({r.scenario for r in some})} {name}{f' × {seeds} seeds' * (seeds > 1)}",
                )
            )
    head = "".join(
        f" {title}: mean, median, 5 % | killed | {policies[0]} is better by |"
        for _, title in groups
    )
    lines = [f"| policy |{head}", "|---|" + "---|---|---|" * len(groups)]
    for policy in policies:
        line = f"| {policy} |"
        for name, _ in groups:
            group = figures[policy]["groups"][name]
            better = (
                ""
                if policy == policies[0]
                else "{:+.1f} ({:+.1f} to {:+.1f})".format(
                    *(100 * value for value in group["behind"])
                )
            )
            line += f" {group['mean']:.3f}, {group['median']:.3f}, {group['p5']:.3f} | {group['kills']} | {better} |"
        lines.append(line)
    return "\n".join(lines)


def lead_over(rows: Sequence[Row], first: str, policy: str) -> list[float]:
    """Returns by how much the first policy's score is better: the mean, and the ends of its 95 % interval.

    Scores are paired by scenario and seed. The interval comes from drawing the scenarios again."""
    scores = {(r.policy, r.scenario, r.seed): r.score for r in rows}
    gains: dict[str, list[float]] = {}
    for r in rows:
        if r.policy == policy:
            gains.setdefault(r.scenario, []).append(scores[first, r.scenario, r.seed] - r.score)
    means = [float(np.mean(gains[name])) for name in sorted(gains)]
    return [round_(value) for value in with_bounds(means)]


def with_bounds(differences: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean difference of pairs, and the ends of its 95 % interval, by drawing the pairs anew."""
    pairs = np.asarray(differences)
    means = np.random.default_rng(0).choice(pairs, (_DRAWS, len(pairs))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(pairs.mean()), float(low), float(high)


def round_(value: Any) -> float:
    """Returns the value rounded for JSON."""
    return round(float(value), 4)
