"""`python -m sluice.agent.lab.faults`: how soon a policy answers a fault, and how restless it is without one.

A case is a drawn pipeline with one fault of 1.5 to 4 times. In every second case the trainer becomes faster within 5 s
of the fault, so that each policy changes something then. For each policy it prints: seconds from the fault until the
knobs are within 5 % of the best for the new costs and stay so (60: never), wrong undos, and the rows of 60 s that are
lost against the best possible. `rest` prints the changes of a minute without a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sluice.agent.lab.faults.cases import (
    AFTER_S,
    FaultCase,
    fluid_case,
    slow_case,
    slow_pipeline,
    twin,
)
from sluice.agent.lab.faults.items import ItemSimulator
from sluice.agent.lab.judge import ResultStore
from sluice.agent.lab.simulator.flow import steady
from sluice.agent.lab.simulator.fluid import Simulator
from sluice.agent.lab.simulator.optimum import best_knobs
from sluice.agent.lab.simulator.physics import TrueCosts
from sluice.agent.lab.simulator.scenario import Scenario
from sluice.agent.lab.yardsticks import describe, make_policy
from sluice.agent.tunable import Policy
from sluice.common.lines import say
from sluice.common.program import run as program
from sluice.common.settings import parse, setting
from sluice.ingest.knobs import Knobs

_NEAR_BEST = 0.95
_WORSE = 0.97  # an undo that leaves less than this share of the rows is wrong
_REST_S, _SETTLED_S = 100.0, 20.0
_Log = list[tuple[float, Knobs]]


def drive(
    simulator: ItemSimulator | Simulator, policy: Policy, seconds: float
) -> tuple[_Log, list[tuple[float, float]]]:
    """Lets a policy decide as the controller does. Returns each setting with its time, and the rows over time."""
    state = policy.initial(simulator.limits, simulator.knobs)
    log, rows = [(0.0, simulator.knobs)], [(0.0, 0.0)]
    wait_s = 0.0
    while simulator.now < seconds - 1e-9:
        if wait_s <= 1e-9:
            wanted, state, _ = policy.decide(simulator.snapshot(), state)
            knobs = simulator.limits.clamp(wanted)
            if knobs != simulator.knobs:
                simulator.apply(knobs)
                log.append((simulator.now, knobs))
            wait_s = min(1.0, policy.next_look_s(state) or 1.0)
        step = min(wait_s, seconds - simulator.now, 0.25)
        simulator.advance(step)
        wait_s -= step
        rows.append((simulator.now, simulator.consumed))
    return log, rows


def rate_of(truth: TrueCosts, knobs: Knobs) -> float:
    """Returns the settled rows a second of a setting at these costs."""
    backends = [knobs.backend.get(s.name, s.backends[0]) for s in truth.stages]
    return steady(truth, [knobs.workers[s.name] for s in truth.stages], backends).rates[-1]


def measure(case: FaultCase, log: _Log, rows: list[tuple[float, float]]) -> dict[str, Any]:
    """Returns how a fault was answered."""
    truth = case.scenario.truth_at(case.settled_at)
    best = rate_of(truth, best_knobs(truth, case.scenario.limits))
    made = [rate_of(truth, knobs) for _, knobs in log]
    best = max(best, *made)
    start = max(i for i, (at, _) in enumerate(log) if at <= case.at)
    times = [case.at, *(at for at, _ in log[start + 1 :]), case.at + AFTER_S]
    settled, undone = 0.0, False
    for i in range(start, len(log)):
        if made[i] < _NEAR_BEST * best:
            settled = min(AFTER_S, times[i - start + 1] - case.at)
        back = i > start and i >= 2 and log[i][1].workers == log[i - 2][1].workers
        undone |= back and made[i] < _WORSE * made[i - 1]
    lost = 1 - (_rows_at(rows, case.at + AFTER_S) - _rows_at(rows, case.at)) / (best * AFTER_S)
    return {
        "seconds": settled,
        "undone": undone,
        "lost": lost,
        "changes": len(log) - 1 - start,
    }


def _rows_at(rows: list[tuple[float, float]], at: float) -> float:
    return next((made for when, made in rows if when >= at - 1e-6), rows[-1][1])


def rest(scenario: Scenario, simulator: ItemSimulator, policy: Policy) -> dict[str, float]:
    """Returns the changes a minute of a settled pipeline, its rows, and its workers over those needed."""
    log, rows = drive(simulator, policy, _REST_S)
    truth = scenario.truth_at(_REST_S)
    lean = best_knobs(truth, scenario.limits)
    best = rate_of(truth, lean)
    after_s = _REST_S - _SETTLED_S
    made = _rows_at(rows, _REST_S) - _rows_at(rows, _SETTLED_S)
    return {
        "changes a minute": 60 * sum(at > _SETTLED_S for at, _ in log) / after_s,
        "rows": made / (after_s * best),
        "workers": simulator.knobs.total_workers / lean.total_workers,
    }


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """The options of `python -m sluice.agent.lab.faults`."""

    title = "what"
    kind: str = setting("slow", "slow, fluid, twin, rest, or tails: rest with heavy tails")
    policy: tuple[str, ...] = setting(("auto", "autotune"), "these policies", again=True)
    first: int = setting(0, "number of the first case", least=0)
    count: int = setting(26, "cases", least=1)
    folder: Path = setting(Path("build/judge"), "keeps the results", metavar="DIR")


def run_case(kind: str, number: int, policy: str, store: ResultStore) -> list[Mapping[str, Any]]:
    """Returns what a policy did in a case."""
    if kind in ("rest", "tails"):
        scenario = slow_pipeline(number, tail=kind == "tails")

        def go_rest() -> Any:
            simulator = ItemSimulator(scenario, seed=number)
            return rest(scenario, simulator, make_policy(policy, scenario))

        return [store.get(policy, f"{kind} {number}", go_rest)]
    drawn = {"slow": slow_case, "fluid": fluid_case}
    cases = twin(number) if kind == "twin" else [drawn[kind](number)]
    results = []
    for i, case in enumerate(cases):

        def go(case: FaultCase = case) -> Any:
            scenario = case.scenario
            mode: type[ItemSimulator | Simulator] = Simulator if kind == "fluid" else ItemSimulator
            made = mode(scenario, seed=number)
            log, rows = drive(made, make_policy(policy, scenario), scenario.seconds)
            return measure(case, log, rows)

        results.append(store.get(policy, f"{kind} {number} {i}", go))
    return results


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    """Returns the object for the last line of output."""
    options = parse(
        FaultOptions, argv, "python -m sluice.agent.lab.faults", description=describe(__doc__)
    )
    store = ResultStore(options.folder)
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in options.policy}
    for number in range(options.first, options.first + options.count):
        line = []
        for name in options.policy:
            results = run_case(options.kind, number, name, store)
            found[name] += results
            line += [" ".join(f"{v:6.2f}" for v in result.values()) for result in results]
        say(f"{options.kind} {number:4d}  {' | '.join(line)}")
    figures = {}
    for name, results in found.items():
        columns = {key: np.array([float(r[key]) for r in results]) for key in results[0]}
        figures[name] = {key: float(np.mean(column)) for key, column in columns.items()}
        if "seconds" in columns:
            seconds = columns["seconds"]
            figures[name] |= {
                "median_s": float(np.median(seconds)),
                "p90_s": float(np.percentile(seconds, 90)),
                "never": float(np.mean(seconds >= AFTER_S - 0.1)),
            }
        say(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures[name].items()))
    return {"policies": figures, "simulated": True}


if __name__ == "__main__":
    program(main)
