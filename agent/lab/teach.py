"""`python -m sluice.agent.lab.teach`: teaches the learned policy in simulated pipelines. Writes its weights.

The policy chooses a pipeline's initial setting. It first learns to imitate an oracle, then from the results of its own
settings. An interrupted training continues. To judge the result on families of pipelines that it has never seen:
`python -m sluice.agent.lab.policies --policy auto --policy planner --weights FILE --pipelines 200`.
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
    seed: int = setting(0, "decides first weights and pipelines")
    out: Path | None = setting(
        None, "weights file (default: opening.safetensors in the folder)", metavar="FILE"
    )


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    options = parse(TeachingOptions, argv, "python -m sluice.agent.lab.teach", description=__doc__)
    import safetensors  # noqa: F401  fails now, not after an hour of training

    from sluice.agent.lab import curriculum
    from sluice.agent.policies.opening.weights import write

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
    write(
        out,
        weights,
        {
            **record,
            "date": datetime.now(UTC).date().isoformat(),
            "command": shlex.join(["python", "-m", "sluice.agent.lab.teach", *argv]),
        },
    )
    say(f"{out}: trained in {record['lives']:,} episodes")
    return {
        "seed": options.seed,
        "lives": record["lives"],
        "exam": record["exam"],
        "weights": str(out),
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    program(main)
