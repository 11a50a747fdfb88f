"""Measures what each of the planner's rules brings: each rule is off in turn, on held-out pipelines.

    python -m benchmarks.ablation                       every rule on 200 pipelines, some forty minutes of one core
    python -m benchmarks.ablation --rule fuse --pipelines 60

Fixed beforehand: the policy is `auto` with the package's opening; the pipelines are 35 of each 100 `held out` and 35
`hidden` ones (numbers from 4000), and 30 that change while they run (from 5000); the measure is the rows of the whole
run as a share of the clairvoyant's, with and without the rule paired by pipeline and seed; intervals come from drawing
pipelines anew. A rule that brings less than .3 points in the mean and nothing (.05) in the 5th percentile is a
candidate to leave; it leaves if no scenario, no test of a mend and no figure of `benchmarks/tuning.py --only mended`
fails without it. All figures are simulated.

A rule is switched off by settings, or by an edit of the one line that has it: an edit that no longer fits is an error,
so that the list stays true.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from sluice.agent.costs.contention import Contention
from sluice.agent.costs.stage_cost import StageCost
from sluice.agent.learn.opening_judgement import Case
from sluice.agent.planner_settings import DEFAULT, PlannerSettings
from sluice.agent.policies.auto import Auto
from sluice.agent.policies.opening.policy import NetworkPolicy
from sluice.agent.policies.planner import changes, planner, state
from sluice.agent.policies.planner.trial_change import TrialChange
from sluice.agent.simulator.random_pipelines import pipeline
from sluice.agent.simulator.rollout import reference, run
from sluice.common.errors import UsageError
from sluice.common.program import run as program
from sluice.common.program import say
from sluice.common.suggest import nearest

TOGETHER = "together"
_DRAWS = 4000
_LEAST, _LEAST_P5 = 0.003, 0.0005
"""Shares of the clairvoyant's rows that a rule has to bring in the mean, or in the 5th percentile, if it is to stay."""


@dataclass(frozen=True, slots=True)
class Edit:
    """A part of a function in which a rule lies, as `ast.unparse` writes it, and what stands there without it."""

    owner: Any
    function: str
    line: str
    without: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the planner, and how it is switched off."""

    name: str
    edits: Sequence[Edit] = ()
    settings: dict[str, Any] = field(default_factory=dict)


@contextmanager
def off(rules: Sequence[Rule]) -> Iterator[PlannerSettings]:
    """A context in which these rules are off, and the settings for it."""
    functions: dict[tuple[Any, str], list[Edit]] = {}
    for edit in itertools.chain.from_iterable(rule.edits for rule in rules):
        functions.setdefault((edit.owner, edit.function), []).append(edit)
    with contextlib.ExitStack() as stack:
        for (owner, name), edits in functions.items():
            function, edited = inspect.getattr_static(owner, name), _edited(owner, name, edits)
            # A function is known by its name to each module that imports it.
            for one in (
                [owner]
                if inspect.isclass(owner)
                else [
                    module
                    for module in list(sys.modules.values())
                    if vars(module).get(name) is function
                ]
            ):
                stack.enter_context(mock.patch.object(one, name, edited))
        yield replace(
            DEFAULT, **{name: value for rule in rules for name, value in rule.settings.items()}
        )


def _edited(owner: Any, name: str, edits: Sequence[Edit]) -> Any:
    function = inspect.getattr_static(owner, name)
    function = getattr(function, "__func__", function)  # of a class method
    source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    for edit in edits:
        if source.count(edit.line) != 1:
            raise UsageError(
                f"{name}: {edit.line!r} is there {source.count(edit.line)} times: a rule has changed; "
                "change the list in benchmarks/ablation.py"
            )
        source = source.replace(edit.line, edit.without)
    made: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{source}", function.__globals__, made)
    return made[name]


def _in(function: str, name: str, line: str, without: str) -> Rule:
    """Returns the rule that a line of a function of the planner's module is."""
    return Rule(name, [Edit(planner, function, line, without)])


def _decide(name: str, line: str, without: str) -> Rule:
    return Rule(name, [Edit(planner.Planner, "decide", line, without)])


RULES = [
    # What is tried.
    Rule(
        "quick first looks",
        [
            Edit(
                planner.Planner,
                "next_look_s",
                "soon = unmeasured and",
                "soon = False and",
            )
        ],
    ),
    _decide(
        "a first glance only adds",
        "if unchanged and state.tick",
        "if False and state.tick",
    ),
    Rule(
        "growth in steps",
        settings={"growth_from_one": 128, "growth_factor": 128, "contended_growth_factor": 128},
    ),
    Rule(
        "smaller steps beside other programs",
        settings={"contended_growth_factor": DEFAULT.growth_factor},
    ),
    _in("_go_faster", "probe", "untried = probe(state, forecast, recent)", "untried = None"),
    Rule("probe for an edge", settings={"edge_power": 1e9}),
    Rule(
        "probe fewer workers than seen",
        [Edit(StageCost, "hopes", "if lean == seen[0] > 1 and", "if False and")],
    ),
    _in(
        "_go_faster",
        "thin",
        "thinned = thin(state, forecast, recent, outlook.ranges)",
        "thinned = None",
    ),
    _in("_plan", "switch where workers wait for each other", "if input_bound:", "if False:"),
    _in("_go_faster", "switch a suspect", "stage_layouts.suspected(forecast, recent), ", ""),
    _in("_go_faster", "fuse", "stage_layouts.fused(forecast)", "()"),
    _in("_go_faster", "split", "stage_layouts.split(forecast)", "()"),
    Rule("what shared a lock is measured anew", [Edit(changes, "reshape", ".stale()", "")]),
    Rule(
        "what shared a lock is relieved",
        [
            Edit(
                changes,
                "reshape",
                "(s.relieved() if state.limits.movable(n, s.backend) else s)",
                "s",
            )
        ],
    ),
    _in(
        "_plan",
        "release",
        "return release(state, forecast, recent, outlook.ranges, outlook.reason(cause))",
        "return (state.knobs, state, outlook.reason(cause))",
    ),
    _in(
        "_plan",
        "a dearer stage grows before the trainer waits",
        "_is_draining(state, outlook)",
        "False",
    ),
    _in("_save_memory", "memory is given back", "if not alarm and", "if True or"),
    # How a change is judged.
    _decide("a crash is undone at once", "state.trial.crashed(state.age, latest)", "False"),
    Rule(
        "harm is undone early",
        [Edit(TrialChange, "verdict", "elif self._hurts(recent):", "elif False:")],
    ),
    Rule(
        "harm is waited out beside others",
        [
            Edit(
                TrialChange,
                "_hurts",
                "and (Contention.of(recent, self.settings).slow < max(self.slow, self.settings.contended_ratio))",
                "",
            )
        ],
    ),
    Rule(
        "a clear gain is kept early",
        settings={"clear_gain": 1e9, "clear_share": 1.0, "clear_kept": 1.0},
    ),
    _in("_switch_instead", "reshape in place of what failed", "if not growing or", "if True or"),
    _in(
        "_expecting",
        "looks while processes start are left out",
        "or any((s.starting for s in snapshot.stages))",
        "",
    ),
    Rule(
        "an opening gives way to the planner's choice",
        [
            Edit(
                planner,
                "_undo",
                "if trial.planner_choice not in (None, trial.before):",
                "if False:",
            )
        ],
    ),
    Rule(
        "the next fault ends a trial without a verdict",
        [Edit(TrialChange, "explains", "not self.leaves_alone(stage, knobs) or", "True or")],
    ),
    # What follows from a failure.
    Rule("a pause after a failure", settings={"pause_ticks": 1, "pause_doublings": 1}),
    Rule("the pause doubles", settings={"pause_doublings": 1}),
    Rule(
        "caps after a failure",
        [Edit(planner, "_undo", "caps_after_failure(state, trial, recent)", "state.caps")],
    ),
    Rule(
        "caps: half-way beside others",
        [Edit(state, "caps_after_failure", "between(before, count) if contended else ", "")],
    ),
    Rule(
        "caps: what was too few",
        [Edit(state, "caps_after_failure", "elif count < before:", "elif False:")],
    ),
    Rule(
        "caps: shorter beside others",
        [
            Edit(
                state,
                "caps_after_failure",
                "(doubt if contended else settings.cap_ticks)",
                "settings.cap_ticks",
            )
        ],
    ),
    _in(
        "_ease_caps",
        "caps ease when cores become freer",
        "cap.eased(forecast.slow, state.tick, state.settings)",
        "cap",
    ),
    Rule(
        "caps ease when a neighbour has left",
        [Edit(state.WorkerCap, "eased", "freer = left or", "freer =")],
    ),
    _in("_keep", "caps go when growing paid off", "if trial.fulfilled(recent)", "if False"),
    # What is learned of costs, and of the cores.
    Rule(
        "other programs are seen",
        [Edit(Contention, "of", "if running < settings.min_running_cores or", "if True or")],
    ),
    _in(
        "_take_in",
        "a change begins everything anew",
        "elif changed:",
        "elif False:",
    ),
    _in("_take_in", "what was tried for a moment is forgotten", ".known_well(stage.workers)", ""),
    Rule("a sudden change of cost", settings={"drift_ratio": 1e9, "rise_ratio": 1e9}),
    Rule("slow drift moves the whole curve", settings={"trend_change": 1e9}),
    Rule(
        "costs while processes start are left out",
        [Edit(StageCost, "observe", "if starting or earlier", "if earlier")],
    ),
    Rule(
        "waits for a core are taken out of costs",
        [
            Edit(
                StageCost,
                "observe",
                "if saturated and (not core_wait_s) and self.points:",
                "if False:",
            )
        ],
    ),
    _in("_plan", "stages that rest are not waited for", " - idle_stages(state, recent)", ""),
    Rule(
        "the largest demand of late counts",
        [
            Edit(
                planner,
                "forecast_of",
                "max(state.demands, default=math.inf)",
                "(state.demands or (math.inf,))[-1]",
            )
        ],
    ),
    # What a setting would bring.
    Rule("headroom", settings={"headroom": 1.0}),
    Rule("leaner buffers for more workers", settings={"lean_gain_ratio": 1e9}),
    Rule("aim lower where cores are short", settings={"halvings": 1}),
    Rule("fusing saves a hand-over", settings={"handover_s": 1e-12}),
]


def cases(count: int) -> list[Case]:
    """So many pipelines, in an order in which the first ones are as mixed as all: of 20, seven held out, seven hidden,
    six that change."""
    found = []
    for i in range(-(-count // 20)):
        found += [
            Case(scenario=pipeline(split, n), seed=n)
            for n in range(4000 + 7 * i, 4007 + 7 * i)
            for split in ("held out", "hidden")
        ]
        found += [
            Case(scenario=pipeline("held out", n, changing=True), seed=n)
            for n in range(5000 + 6 * i, 5006 + 6 * i)
        ]
    return found[:count]


def scored(
    case: Case, rules: Sequence[Rule], opener: NetworkPolicy, best: float
) -> tuple[float, bool]:
    """The share of the clairvoyant's rows with these rules off, and whether it was killed."""
    with off(rules) as settings:
        outcome = run(case.scenario, Auto(opener, settings=settings), seed=case.seed)
    return outcome.rows / max(1e-9, best), outcome.killed


def table(arms: Collection[str], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rule brings, the most first."""
    rows, draw = [], np.random.default_rng(0)
    drawn = draw.integers(0, len(found), (_DRAWS, len(found)))
    full = np.array([one["all"][0] for one in found])
    kills = sum(one["all"][1] for one in found)
    for arm in arms:
        without = np.array([one[arm][0] for one in found])
        gains = full - without
        low, high = np.quantile(gains[drawn].mean(axis=1), [0.025, 0.975])
        fifth = float(np.quantile(full, 0.05) - np.quantile(without, 0.05))
        more_kills = sum(one[arm][1] for one in found) - kills
        rows.append(
            {
                "rule": arm,
                "mean": 100 * float(gains.mean()),
                "low": 100 * float(low),
                "high": 100 * float(high),
                "p5": 100 * fifth,
                "kills": more_kills,
                "differs": int((np.abs(gains) > 1e-9).sum()),
                "candidate": bool(gains.mean() < _LEAST and fifth < _LEAST_P5 and more_kills <= 0),
            }
        )
    return sorted(rows, key=lambda row: -row["mean"])


def text(rows: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> str:
    full = np.array([one["all"][0] for one in found])
    head = (
        f"{len(found)} pipelines, all rules: median {np.median(full):.3f}, mean {full.mean():.3f}, 5th percentile "
        f"{np.quantile(full, 0.05):.3f}, {sum(one['all'][1] for one in found)} killed"
    )
    lines = [
        head,
        "",
        "| rule | mean, points | 5th percentile | more kills without | pipelines that differ | |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        "| {rule} | {mean:+.2f} ({low:+.2f} to {high:+.2f}) | {p5:+.2f} | {kills} | {differs} |".format(
            **row
        )
        + f" {'may leave' if row['candidate'] else ''} |"
        for row in rows
    ]
    return "\n".join(lines)


def measure(
    arms: Mapping[str, Sequence[Rule]],
    some: Sequence[Case],
    keep: Callable[[dict[str, Any]], None],
    done: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """All arms on all pipelines but those that are `done`; each pipeline's result is handed to `keep`. An arm has the
    rules that are off in it."""
    opener = NetworkPolicy.in_use()
    if opener is None:
        raise UsageError("there are no weights of an opening: `make policy` makes them")
    found = list(done)
    for case in some[len(done) :]:
        best = reference(case.scenario, seed=case.seed).rows
        one = {arm: scored(case, rules, opener, best) for arm, rules in {"all": (), **arms}.items()}
        keep(one)
        found.append(one)
    return found


def main(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rule", action="append", metavar="NAME", help="this rule (default: all)")
    parser.add_argument(
        "--together", action="store_true", help="these rules off at once, in place of one by one"
    )
    parser.add_argument(
        "--pipelines", type=int, default=200, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="a line for each pipeline: goes on where it ended"
    )
    options = parser.parse_args(argv)
    names = [rule.name for rule in RULES]
    for name in options.rule or ():
        if name not in names:
            raise UsageError(f"no rule {name!r}{nearest(name, names)}")
    if options.pipelines < 1:
        raise UsageError("--pipelines is at least 1")
    arms: dict[str, Sequence[Rule]] = {
        rule.name: [rule] for rule in RULES if rule.name in (options.rule or names)
    }
    if options.together:
        arms = {TOGETHER: [rule for rules in arms.values() for rule in rules]}
    done = (
        []
        if options.keep is None or not options.keep.exists()
        else [json.loads(line) for line in options.keep.read_text().splitlines()][
            : options.pipelines
        ]
    )
    if any(missing := arms.keys() - one.keys() for one in done):
        raise UsageError(
            f"{options.keep}: it is of other rules: {', '.join(sorted(missing))} are not in it"
        )

    def keep(one: dict[str, Any]) -> None:
        if options.keep is not None:
            with options.keep.open("a") as file:
                file.write(json.dumps(one) + "\n")

    found = measure(arms, cases(options.pipelines), keep, done)
    rows = table(arms, found)
    say(text(rows, found))
    return {"pipelines": len(found), "rules": rows, "simulated": True}


if __name__ == "__main__":
    program(main)
