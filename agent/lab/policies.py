"""`python -m sluice.agent.lab.policies`: runs every policy in every scenario, and prints a table of scores.

A score is the number of rows in the whole scenario, as a share of the rows of the clairvoyant with the same seed. It
includes the start and the time after each change. The end score counts only the last fifth. A run that is killed for
memory delivers nothing from then on. Held-out pipelines come from families on which no policy was trained. Policies run
with the governor, which keeps to the memory limit.

All these figures are simulated, and take about seven minutes on two free cores. `--live` adds pipelines that really run
on this machine, about 70 seconds each. They are in `benchmarks/` of the repository, and docs/scenarios.md describes
their scores.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sluice.agent import policies
from sluice.agent.lab.yardsticks import YARDSTICKS, default_policies, describe, make_policy
from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run as program
from sluice.common.settings import parse, setting

if TYPE_CHECKING:
    from sluice.agent.lab.simulator.scenario import Scenario
    from sluice.agent.lab.tables import Row


LIVE = ("auto", "intune", "autotune", "plumber")
"""The default policies for live set-ups."""
_FRESH = 3_000
"""Constant pipelines with lower numbers were used during development."""
_START_S = 10


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """One scenario with one seed. Every policy runs it, with the same reference."""

    scenario: Scenario
    policies: tuple[str, ...]
    seed: int


def run_task(task: EvaluationTask) -> list[Row]:
    """Returns the results of all policies of a task. `measure` calls it in another process."""
    from sluice.agent.lab.simulator.rollout import end_score, reference, run, score
    from sluice.agent.lab.tables import Row

    best = reference(task.scenario, seed=task.seed)
    rows = []
    for name in task.policies:
        policy = make_policy(name, task.scenario)
        outcome = run(task.scenario, policy, seed=task.seed)
        rows.append(
            Row(
                task.scenario.name,
                task.scenario.family,
                name,
                task.seed,
                score(outcome, best),
                end_score(outcome, best),
                sum(outcome.rates[:_START_S]) / max(1e-9, sum(best.rates[:_START_S])),
                outcome.killed,
            )
        )
    return rows


def tasks(
    names: Sequence[str],
    scenarios: Sequence[Scenario],
    *,
    seeds: int,
    pipelines: int,
) -> list[EvaluationTask]:
    """Returns the tasks: the scenarios with every seed, and `pipelines` held-out pipelines of each of two kinds.

    One kind is constant, and the other changes during the run. Each pipeline has its own seed."""
    from sluice.agent.lab.simulator.random_pipelines import pipeline

    todo = [(scenario, seed) for scenario in scenarios for seed in range(seeds)]
    todo += [
        (pipeline("held out", first + i, changing=changing), first + i)
        for changing, first in ((False, _FRESH), (True, 0))
        for i in range(pipelines)
    ]
    return [EvaluationTask(scenario, tuple(names), seed) for scenario, seed in todo]


def measure(
    todo: Sequence[EvaluationTask], *, processes: int, progress: Callable[[int, int], None]
) -> list[Row]:
    """Runs all tasks on this number of processes, and returns all results."""
    rows: list[Row] = []
    if processes <= 1:
        for i, task in enumerate(todo):
            rows += run_task(task)
            progress(i + 1, len(todo))
        return rows
    # Each process uses one core, so libraries must not start more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for i, more in enumerate(pool.imap_unordered(run_task, todo)):
            rows += more
            progress(i + 1, len(todo))
        pool.close()
        pool.join()
    return rows


_EXAMPLES = """examples:
  python -m sluice.agent.lab.policies
  python -m sluice.agent.lab.policies --quick --policy auto --policy autotune
  python -m sluice.agent.lab.policies --live-only --setup 'far store'
  python -m sluice.agent.lab.policies --scenario mine.json     (docs/scenarios.md describes the file)"""


@dataclass(frozen=True, kw_only=True)
class ContestOptions:
    """The options of the live set-ups on this machine."""

    title = "live set-ups"
    live: bool = setting(
        False,
        "also run live set-ups on this machine, which should do nothing else meanwhile (auto, "
        "intune, autotune and plumber, unless --policy says otherwise)",
    )
    live_only: bool = setting(False, "run these alone")
    setup: tuple[str, ...] = setting(
        (),
        "of the live set-ups (benchmarks/live_setups.py) these alone",
        metavar="NAME",
        again=True,
    )
    rounds: int = setting(10, "turns of each live arm", least=1)
    starts: int = setting(1, "times that each policy begins anew, in turns", least=1)
    settle: float = setting(
        10.0, "seconds in which a policy tunes a live pipeline", metavar="S", above=0
    )
    seconds: float = setting(0.4, "least seconds of each live turn", metavar="S", above=0)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The options of `python -m sluice.agent.lab.policies`."""

    title = "what"
    policy: tuple[str, ...] = setting(
        (), "these policies alone (default: all)", metavar="P", again=True
    )
    scenario: tuple[str, ...] = setting(
        (),
        "these scenarios alone (default: the shipped ones and held-out pipelines)",
        metavar="FILE",
        again=True,
    )
    seeds: int = setting(5, "seeds of each scenario", least=1)
    pipelines: int | None = setting(
        None,
        "held-out pipelines at rest, and as many that change (default: 45; 0 with --scenario)",
        least=0,
    )
    quick: bool = setting(False, "one seed, four held-out pipelines at rest and four that change")
    processes: int = setting(os.cpu_count() or 1, "processes that simulate", least=1)
    contest: ContestOptions = field(default_factory=ContestOptions)


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    """Returns the object for the last line of output."""
    options = parse(
        PolicyOptions,
        argv,
        "python -m sluice.agent.lab.policies",
        description=describe(__doc__),
        epilog=_EXAMPLES,
    )
    for name in options.policy:
        if name not in YARDSTICKS:
            policies.make(name)
    live = options.contest.live or options.contest.live_only
    figures = {} if options.contest.live_only else _simulated(options)
    return {**figures, **(_live(options) if live else {})}


def _simulated(options: PolicyOptions) -> dict[str, Any]:
    from sluice.agent.lab.simulator.scenario_json import load, shipped
    from sluice.agent.lab.tables import comparison, summary, table

    names = list(dict.fromkeys(options.policy or default_policies()))
    scenarios = [load(path) for path in options.scenario] if options.scenario else shipped()
    if options.pipelines is not None:
        pipelines = options.pipelines
    elif options.scenario:
        pipelines = 0
    elif options.quick:
        pipelines = 4
    else:
        pipelines = 45
    todo = tasks(
        names,
        scenarios,
        seeds=1 if options.quick else options.seeds,
        pipelines=pipelines,
    )
    rows = measure(todo, processes=min(options.processes, len(todo)), progress=_progress)
    say(f"{table(rows, names)}\n\n{comparison(rows, names)}")
    return {
        "policies": summary(rows, names),
        "scenarios": len(scenarios),
        "pipelines": 2 * pipelines,
        "simulated": True,
    }


def _live(options: PolicyOptions) -> dict[str, Any]:
    if not policies.has_rivals():
        raise UsageError(
            "--live is not part of the installed package: the contest lies in benchmarks/rivals of the "
            "repository"
        )
    from sluice.benchmarks.rivals.contest import hold

    # Yardsticks need the true costs, which only the simulator has.
    names = [n for n in dict.fromkeys(options.policy or LIVE) if n not in YARDSTICKS]
    contests = hold(
        names,
        setups=options.contest.setup,
        rounds=options.contest.rounds,
        seconds=options.contest.seconds,
        settle_s=options.contest.settle,
        starts=options.contest.starts,
        say=say,
    )
    return {"live": {name: contest.to_dict() for name, contest in contests.items()}}


def _progress(done: int, total: int) -> None:
    """Shows the progress: on a terminal after each task, otherwise after each tenth of them."""
    if sys.stderr.isatty():
        print(
            f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True
        )
    elif 10 * done // total > 10 * (done - 1) // total:
        say(f"{done} of {total} scenarios and pipelines")


if __name__ == "__main__":
    program(main)
