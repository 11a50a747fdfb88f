"""`sluice teach`: teaches a learned policy in simulated pipelines, with torch, and writes its weights.

`opening` chooses a pipeline's initial setting. It first learns to imitate an oracle, then from the results of its own
settings. An interrupted training continues, and the result is judged on families of pipelines that it has never seen.
`intune` is the reconstruction of a published tuner, which learns by deep Q-learning.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.common.program import run as program
from sluice.common.program import say
from sluice.common.settings import parse, setting


@dataclass(frozen=True, kw_only=True)
class IntuneLearning:
    """How `intune` learns."""

    title = "intune"
    decisions: int = setting(320_000, "decisions to learn from", least=1)
    without_model_latency: bool = setting(False, "hide that input: the ablation")
    validated: int = setting(40, "pipelines on which its live variants are compared", least=1)


@dataclass(frozen=True, kw_only=True)
class OpeningLearning:
    """How `opening` learns."""

    title = "opening"
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


@dataclass(frozen=True, kw_only=True)
class TeachingOptions:
    """The policy to teach, and the file for its weights."""

    policy: str = setting("intune", "the policy to teach", choices=("intune", "opening"))
    seed: int = setting(0, "decides first weights and pipelines")
    out: Path | None = setting(
        None,
        "weights file (default: intune's in use; opening.safetensors in the folder)",
        metavar="FILE",
    )
    intune: IntuneLearning = field(default_factory=IntuneLearning)
    opening: OpeningLearning = field(default_factory=OpeningLearning)


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    options = parse(TeachingOptions, argv=argv, prog="sluice teach", description=__doc__)
    import safetensors  # noqa: F401  fails now, not after an hour of training

    began = time.monotonic()
    if options.policy == "intune":
        from sluice.agent.policies.intune import WEIGHTS

        found = _intune(options, options.out or WEIGHTS, argv)
    else:
        found = _opening(
            options, options.out or options.opening.folder / "opening.safetensors", argv
        )
    return {
        "policy": options.policy,
        "seed": options.seed,
        **found,
        "seconds": round(time.monotonic() - began, 1),
    }


def _intune(options: TeachingOptions, out: Path, argv: Sequence[str]) -> dict[str, Any]:
    from sluice.agent.learn import intune_teacher
    from sluice.agent.policies.opening.weights import write

    learning, seen = options.intune, not options.intune.without_model_latency
    layers, mean = intune_teacher.learn(
        learning.decisions, options.seed, model_latency=seen, say=say
    )
    table = intune_teacher.compare_variants(
        layers, learning.validated, list(intune_teacher.VARIANTS), model_latency=seen
    )
    for name, one in table.items():
        say(
            f"learning rate in the live pipeline: {name:<10} median {one['median']:.3f}, mean {one['mean']:.3f}, "
            f"5th percentile {one['p5']:.3f}"
        )
    tensors = {
        f"{kind}{i}": tensor
        for i, layer in enumerate(layers)
        for kind, tensor in zip(("weight", "bias"), layer, strict=True)
    }
    write(
        out,
        tensors,
        {
            **_made(argv),
            "seed": options.seed,
            "decisions": learning.decisions,
            "reward": mean,
            "table": table,
        },
    )
    say(f"{out}: mean reward {mean:.3f} over the last fifth of {learning.decisions:,} decisions")
    return {"decisions": learning.decisions, "reward": mean, "table": table, "weights": str(out)}


def _made(argv: Sequence[str]) -> dict[str, str]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["sluice", "teach", *argv]),
    }


def _opening(options: TeachingOptions, out: Path, argv: Sequence[str]) -> dict[str, Any]:
    from sluice.agent.learn import curriculum, opening_judgement
    from sluice.agent.policies.auto import Auto
    from sluice.agent.policies.opening.policy import NetworkPolicy
    from sluice.agent.policies.opening.weights import write
    from sluice.agent.policies.planner.planner import Planner

    learning = options.opening
    plan = curriculum.Curriculum(
        seed=options.seed,
        lives=learning.lives,
        rounds=learning.rounds,
        imitations=learning.imitations,
        gradients=learning.gradients,
    )
    weights, record = curriculum.teach(plan, learning.folder, say)
    learned = NetworkPolicy(weights, record)
    table = opening_judgement.judge(
        lambda: Auto(learned), Planner, opening_judgement.cases("held out", learning.judged)
    )
    say(table.text())
    write(
        out,
        weights,
        {
            **record,
            "date": datetime.now(UTC).date().isoformat(),
            "table": table.to_dict(),
            "command": shlex.join(["sluice", "teach", *argv]),
        },
    )
    say(f"{out}: trained in {record['lives']:,} episodes; {table.verdict()}")
    return {
        "lives": record["lives"],
        "exam": record["exam"],
        "weights": str(out),
        "table": table.to_dict(),
        "ships": table.ships,
    }


if __name__ == "__main__":
    program(main)
