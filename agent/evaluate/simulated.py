"""`sluice policies`: every policy through every scenario in the simulator, and the whole table.

A score is the rows delivered over the whole scenario, start and transients included, as a share of what the clairvoyant
delivers with the same seed; the end score beside it looks at the last fifth alone. A run that is killed for memory
delivers nothing from then on. Held-out pipelines are from another generator than training's. Policies without a
mention of it run under the governor; the last columns show them without it (first seeds only). All figures are
simulated, but for those of `--live`: it adds live set-ups on this machine, some 70 seconds each (they lie in
`benchmarks/` of the repository; docs/scenarios.md says how they are scored). Without them the whole takes some five
minutes on two free cores.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sluice.agent import policies
from sluice.agent.simulator.oracle import Oracle
from sluice.agent.simulator.random_pipelines import held_out
from sluice.agent.simulator.rollout import end_score, frozen_rows, metric, reference, run, score
from sluice.agent.simulator.scenario import Scenario
from sluice.agent.simulator.scenario_json import load, shipped
from sluice.agent.tunable import Reason
from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import run as program
from sluice.etl.common.program import say
from sluice.etl.common.settings import parse, setting
from sluice.ingest.knobs import Knobs
from sluice.ingest.stats import Snapshot

_TITLES = {
    "score": "score (rows over the whole scenario ÷ the clairvoyant's): median ± half the spread; held out: median/5 %",
    "end": "end score (rows in the last fifth ÷ the clairvoyant's)",
}


def judged() -> list[str]:
    """The policies that are judged unless some are named: `shadow` changes nothing, and the oracle is a yardstick."""
    return [*(name for name in policies.names() if name != "shadow"), "oracle"]


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """One scenario with one seed: every policy goes through it, beside the same reference."""

    scenario: Scenario
    policies: tuple[str, ...]
    seed: int
    bare: bool
    """Whether policies also run without the governor."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one policy in one scenario with one seed."""

    scenario: str
    family: str
    policy: str
    seed: int
    score: float
    end: float
    killed: bool
    failed: tuple[str, ...]
    """The scenario's conditions that the policy missed, with the values that it reached."""
    bare_score: float | None
    bare_killed: bool


def work(task: EvaluationTask) -> list[Row]:
    """Runs one task; it is called in a separate process."""
    best = reference(task.scenario, seed=task.seed)
    rows = []
    for name in task.policies:
        def policy(name: str = name) -> Any:
            return Oracle(task.scenario.truth_at) if name == "oracle" else policies.make(name)

        outcome = run(task.scenario, policy(), seed=task.seed)
        failed = []
        for condition in task.scenario.passes:
            frozen = frozen_rows(task.scenario, policy(), seed=task.seed) if condition.metric == "of_frozen" else None
            value = metric(condition, outcome, best, frozen)
            if not condition.holds(value):
                failed.append(f"{condition}: {value:.3g}")
        bare = None if not task.bare else outcome if not outcome.governor_acted else run(
            task.scenario, policy(), seed=task.seed, governor=False)
        rows.append(Row(task.scenario.name, task.scenario.family, name, task.seed, score(outcome, best),
                        end_score(outcome, best), outcome.killed, tuple(failed),
                        score(bare, best) if bare else None, bool(bare and bare.killed)))
    return rows


def tasks(names: Sequence[str], scenarios: Sequence[Scenario], *, seeds: int,
          pipelines: int) -> list[EvaluationTask]:
    """The scenarios with every seed, and `pipelines` held-out pipelines of each family, each with a seed of its own."""
    todo = [EvaluationTask(scenario, tuple(names), seed,
                            bare=seed == 0) for scenario in scenarios for seed in range(seeds)]
    todo += [EvaluationTask(held_out(i, changing=changing), tuple(names), i, bare=i % seeds == 0)
              for i in range(pipelines) for changing in (False, True)]
    return todo


def measure(todo: Sequence[EvaluationTask], *, processes: int, progress: Callable[[int, int], None]) -> list[Row]:
    """Runs all tasks on so many processes, and returns all rows."""
    rows: list[Row] = []
    if processes <= 1:
        for i, task in enumerate(todo):
            rows += work(task)
            progress(i + 1, len(todo))
        return rows
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes are the parallelism
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for i, more in enumerate(pool.imap_unordered(work, todo)):
            rows += more
            progress(i + 1, len(todo))
        pool.close()
        pool.join()
    return rows


def table(rows: Sequence[Row], policies: Sequence[str], *, bold: bool) -> str:
    """Policy × scenario: the median and the spread over the seeds; families: median and 5th percentile."""
    names = list(dict.fromkeys(r.scenario for r in sorted(rows, key=lambda r: r.scenario) if r.family == "scenario"))
    groups = [(n, [r for r in rows if r.scenario == n]) for n in names]
    groups += [(f"held out, {f} ({len({r.scenario for r in rows if r.family == f})})",
                [r for r in rows if r.family == f]) for f in ("stationary", "changing")
               if any(r.family == f for r in rows)]
    width = max(len(p) for p in policies) + 2
    short = [f"{i + 1:>2}" for i in range(len(groups))]
    lines = [f"{s}  {name}" for s, (name, _) in zip(short, groups, strict=True)]
    for cells, title in _TITLES.items():
        lines += ["", title, " " * width + "".join(f"{s:>11}" for s in short)]
        medians = {(p, i): float(np.median([getattr(r, cells) for r in group if r.policy == p]))
                   for p in policies for i, (_, group) in enumerate(groups)}
        best = [max(round(medians[p, i], 3) for p in policies if p != "oracle" or len(policies) == 1)
                for i in range(len(groups))]
        for policy in policies:
            line = f"{policy:<{width}}"
            for i, (_, group) in enumerate(groups):
                values = [getattr(r, cells) for r in group if r.policy == policy]
                text = (f"{np.median(values):.2f}/{np.percentile(values, 5):.2f}" if group[0].family != "scenario"
                        else f"{np.median(values):.3f}±{(max(values) - min(values)) / 2:.2f}")
                killed = sum(r.killed for r in group if r.policy == policy)
                text += "†" if killed else ""
                marked = bold and round(medians[policy, i], 3) >= best[i]
                line += " " * max(0, 11 - len(text)) + (f"\033[1m{text}\033[0m" if marked else text)
            lines.append(line)
    head = f"{'over all':<{width}}{'median':>9}{'5 %':>9}{'kills':>9}{'passes':>9}{'bare':>9}{'bare kills':>12}"
    lines += ["", f"{head}  († killed for memory; bare: without the governor)"]
    for policy, figures in summary(rows, policies).items():
        lines.append(
            f"{policy:<{width}}{figures['median']:>9.3f}{figures['p5']:>9.3f}{figures['kills']:>9}"
            f"{figures['passes']:>6}/{figures['of']:<2}{figures['bare_median']:>9.3f}{figures['bare_kills']:>12}")
    return "\n".join(lines)


def summary(rows: Sequence[Row], policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The figures that the program's last line reports of each policy."""
    figures_of = {}
    for policy in policies:
        own = [r for r in rows if r.policy == policy]
        scenarios = sorted({r.scenario for r in own if r.family == "scenario"})
        passed = [n for n in scenarios if 2 * sum(bool(r.failed) for r in own if r.scenario == n)
                  < sum(r.scenario == n for r in own)]
        bare = [r.bare_score for r in own if r.bare_score is not None]
        figures_of[policy] = {
            "median": _round(np.median([r.score for r in own])), "p5": _round(np.percentile([r.score for r in own], 5)),
            "end_median": _round(np.median([r.end for r in own])), "kills": sum(r.killed for r in own),
            "passes": len(passed), "of": len(scenarios),
            "families": {f: {"median": _round(np.median(v)), "p5": _round(np.percentile(v, 5))}
                         for f in ("scenario", "stationary", "changing")
                         if (v := [r.score for r in own if r.family == f])},
            "bare_median": _round(np.median(bare)),
            "bare_kills": sum(r.bare_killed for r in own)}
    return figures_of


def missed(rows: Sequence[Row], policies: Sequence[str]) -> list[str]:
    """The conditions that were missed, by policy and scenario (with the first seed that missed them)."""
    lines = []
    for policy in policies:
        for row in sorted(rows, key=lambda r: (r.scenario, r.seed)):
            if row.policy == policy and row.failed and row.seed == 0:
                lines.append(f"{policy}: {row.scenario}: {'; '.join(row.failed)}")
    return lines


def _round(value: Any) -> float:
    return round(float(value), 4)


_EXAMPLES = """examples:
  sluice policies
  sluice policies --quick --policy planner --policy ds2
  sluice policies --live-only --setup 'far store'
  sluice policies --scenario mine.json     (docs/scenarios.md describes the file)"""


@dataclass(frozen=True, kw_only=True)
class ContestOptions:
    """The live set-ups that are run on this machine, and for how long."""

    title = "live set-ups"
    live: bool = setting(False, "also run live set-ups on this machine, which should do nothing else meanwhile (the "
                         "planner alone, unless --policy says otherwise)")
    live_only: bool = setting(False, "run these alone")
    setup: tuple[str, ...] = setting((), "of the live set-ups (benchmarks/live_setups.py) these alone", metavar="NAME",
                                     again=True)
    rounds: int = setting(10, "turns of each live arm", least=1)
    settle: float = setting(10.0, "seconds in which a policy tunes a live pipeline", metavar="S", above=0)
    seconds: float = setting(0.4, "least seconds of each live turn", metavar="S", above=0)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Which policies are judged, and in which scenarios."""

    title = "what"
    policy: tuple[str, ...] = setting((), "these policies alone (default: all)", metavar="P", again=True)
    scenario: tuple[str, ...] = setting((), "these scenarios alone (default: the shipped ones and held-out pipelines)",
                                        metavar="FILE", again=True)
    seeds: int = setting(5, "seeds of each scenario", least=1)
    pipelines: int | None = setting(None, "held-out pipelines of each family (default: 30; 0 with --scenario)", least=0)
    quick: bool = setting(False, "one seed, four held-out pipelines of each family")
    missed: bool = setting(False, "also list the conditions that were missed")
    processes: int = setting(os.cpu_count() or 1, "processes that simulate", least=1)
    contest: ContestOptions = field(default_factory=ContestOptions)


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    options = parse(PolicyOptions, argv=argv, prog="sluice policies", description=_described(__doc__),
                    epilog=_EXAMPLES)
    for name in options.policy:
        if name != "oracle":
            policies.make(name)
    live = options.contest.live or options.contest.live_only
    figures = {} if options.contest.live_only else _simulated(options)
    return {**figures, **(_live(options) if live else {})}


def _described(text: str | None) -> str:
    return f"{text}\nPolicies: {', '.join(judged())}."


def _simulated(options: PolicyOptions) -> dict[str, Any]:
    names = list(dict.fromkeys(options.policy or judged()))
    scenarios = [load(path) for path in options.scenario] if options.scenario else shipped()
    pipelines = options.pipelines if options.pipelines is not None else (
        0 if options.scenario else 4 if options.quick else 30)
    todo = tasks(names, scenarios, seeds=1 if options.quick else options.seeds, pipelines=pipelines)
    rows = measure(todo, processes=min(options.processes, len(todo)), progress=_progress)
    say(table(rows, names, bold=sys.stderr.isatty()))
    if options.missed:
        say("\n" + "\n".join(missed(rows, names)))
    return {"policies": summary(rows, names), "scenarios": len(scenarios), "pipelines": 2 * pipelines,
            "simulated": True}


def _live(options: PolicyOptions) -> dict[str, Any]:
    if not policies.find_rivals():
        raise UsageError("--live is not part of the installed package: the contest lies in benchmarks/rivals of the "
                         "repository")
    from sluice.benchmarks.rivals.contest import hold

    names = [n for n in dict.fromkeys(options.policy or ["planner"]) if n != "oracle"]  # no truth to know here
    contests = hold(names, setups=options.contest.setup, rounds=options.contest.rounds,
                    seconds=options.contest.seconds, settle_s=options.contest.settle, say=say)
    return {"live": {name: contest.to_dict() for name, contest in contests.items()}}


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Which policy goes through which scenario."""

    policy: str = setting("planner", "the policy that is run", metavar="P")
    scenario: str = setting("steady", "a file (docs/scenarios.md), or part of a shipped one's name",
                            metavar="FILE|WORD")
    seed: int = setting(0, "decides what the scenario draws")
    without_governor: bool = setting(False, "let nothing hold the memory back")


def simulate(argv: Sequence[str]) -> Mapping[str, Any]:
    """`sluice simulate`: runs one policy through one scenario, and prints each change with its reason."""
    options = parse(SimulationOptions, argv=argv, prog="sluice simulate", description=_described(simulate.__doc__),
                    epilog="example:\n  sluice simulate --policy planner --scenario 'cost'")
    scenario = next((s for s in shipped() if options.scenario in s.name), None) or load(options.scenario)
    policy = Oracle(scenario.truth_at) if options.policy == "oracle" else policies.make(options.policy)
    before = scenario.first_knobs

    def tell(snapshot: Snapshot, knobs: Knobs, reason: Reason) -> None:
        nonlocal before
        if knobs != before:
            say(f"{snapshot.at:7.1f} s  {knobs}  ({reason.text})")
        before = knobs

    say(f"{scenario.name}: {scenario.about}\n{0.0:7.1f} s  {before}  (the start)")
    outcome = run(scenario, policy, seed=options.seed, governor=not options.without_governor, observe=tell)
    best = reference(scenario, seed=options.seed)
    say(f"{score(outcome, best):.3f} of the clairvoyant's rows, {end_score(outcome, best):.3f} in the last fifth"
        + (", killed for memory" if outcome.killed else ""))
    return {"scenario": scenario.name, "policy": options.policy, "rows": round(outcome.rows),
            "score": _round(score(outcome, best)), "end_score": _round(end_score(outcome, best)),
            "killed": outcome.killed, "changes": sum(outcome.changed), "knobs": outcome.knobs.to_dict(),
            "simulated": True}


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif 10 * done // total > 10 * (done - 1) // total:
        say(f"{done} of {total} scenarios and pipelines")


if __name__ == "__main__":
    program(main)
