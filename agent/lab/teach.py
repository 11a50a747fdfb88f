"""`python -m sluice.agent.lab.teach`: teaches the learned policy in simulated pipelines. Writes its weights.

The policy chooses a pipeline's initial setting. It first learns to imitate an oracle, then from the results of its own
settings. An interrupted training continues, and the result is judged on families of pipelines that it has never seen.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.common.program import run as program
from sluice.common.program import say
from sluice.common.settings import parse, setting


@dataclass(frozen=True, kw_only=True)
class TeachingOptions:
    """How the learned policy is taught, and the file for its weights."""

    title = "what"
    lives: int = setting(20_000, "simulated pipelines to imitate on", least=1)
    rounds: int = setting(4, "rounds of imitation; from the second on, the student acts", least=1)
    imitations: int = setting(2_000, "steps of imitation in each round", least=1)
    gradients: int = setting(100, "steps of policy gradient", least=0)
    folder: Path = setting(
        Path("build/opening"),
        "folder for the progress; an interrupted training continues there",
        metavar="FOLDER",
    )
    judged: int = setting(
        100, "held-out pipelines on which it is compared with the planner", least=2
    )
    seed: int = setting(0, "decides first weights and pipelines")
    out: Path | None = setting(
        None, "weights file (default: opening.safetensors in the folder)", metavar="FILE"
    )


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    options = parse(TeachingOptions, argv, "python -m sluice.agent.lab.teach", description=__doc__)
    import safetensors  # noqa: F401  fails now, not after an hour of training

    from sluice.agent.lab import curriculum, opening_judgement
    from sluice.agent.policies.auto import Auto
    from sluice.agent.policies.opening.policy import NetworkPolicy
    from sluice.agent.policies.opening.weights import write
    from sluice.agent.policies.planner.planner import Planner

    began = time.monotonic()
    out = options.out or options.folder / "opening.safetensors"
    plan = curriculum.Curriculum(
        seed=options.seed,
        lives=options.lives,
        rounds=options.rounds,
        imitations=options.imitations,
        gradients=options.gradients,
    )
    weights, record = curriculum.teach(plan, options.folder, say)
    learned = NetworkPolicy(weights, record)
    table = opening_judgement.judge(
        lambda: Auto(learned), Planner, opening_judgement.cases("held out", options.judged)
    )
    say(table.text())
    write(
        out,
        weights,
        {
            **record,
            "date": datetime.now(UTC).date().isoformat(),
            "table": table.to_dict(),
            "command": shlex.join(["python", "-m", "sluice.agent.lab.teach", *argv]),
        },
    )
    say(f"{out}: trained in {record['lives']:,} episodes; {table.verdict()}")
    return {
        "seed": options.seed,
        "lives": record["lives"],
        "exam": record["exam"],
        "weights": str(out),
        "table": table.to_dict(),
        "ships": table.ships,
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    program(main)
