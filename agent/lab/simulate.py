"""`python -m sluice.agent.lab.simulate`: runs one policy in one scenario, and prints each change with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice.agent.lab.yardsticks import describe, make_policy
from sluice.common.lines import say
from sluice.common.program import run as program
from sluice.common.settings import parse, setting

if TYPE_CHECKING:
    from sluice.agent.tunable import Reason
    from sluice.ingest.knobs import Knobs
    from sluice.ingest.stats import Snapshot


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """The options of the program."""

    policy: str = setting("auto", "the policy that is run", metavar="P")
    scenario: str = setting(
        "steady", "a file (docs/scenarios.md), or part of a shipped one's name", metavar="FILE|WORD"
    )
    seed: int = setting(0, "decides what the scenario draws")


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    options = parse(
        SimulationOptions,
        argv,
        "python -m sluice.agent.lab.simulate",
        description=describe(__doc__),
        epilog="example:\n  python -m sluice.agent.lab.simulate --policy auto --scenario 'cost'",
    )

    from sluice.agent.lab.simulator.rollout import end_score, reference, run, score
    from sluice.agent.lab.simulator.scenario_json import load, shipped

    scenario = next((s for s in shipped() if options.scenario in s.name), None) or load(
        options.scenario
    )
    policy = make_policy(options.policy, scenario)
    before = scenario.first_knobs

    def print_change(snapshot: Snapshot, knobs: Knobs, reason: Reason) -> None:
        nonlocal before
        if knobs != before:
            say(f"{snapshot.at:7.1f} s  {knobs}  ({reason.text})")
        before = knobs

    say(f"{scenario.name}: {scenario.about}\n{0.0:7.1f} s  {before}  (the start)")
    outcome = run(scenario, policy, seed=options.seed, observe=print_change)
    best = reference(scenario, seed=options.seed)
    say(
        f"{score(outcome, best):.3f} of the clairvoyant's rows, {end_score(outcome, best):.3f} in the last fifth"
        + (", killed for memory" if outcome.killed else "")
    )
    return {
        "scenario": scenario.name,
        "policy": options.policy,
        "rows": round(outcome.rows),
        "score": round(score(outcome, best), 4),
        "end_score": round(end_score(outcome, best), 4),
        "killed": outcome.killed,
        "changes": outcome.changes,
        "knobs": outcome.knobs.to_dict(),
        "simulated": True,
    }


if __name__ == "__main__":
    program(main)
