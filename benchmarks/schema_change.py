"""Compares trainings with and without the agent after new columns came, in paired rounds.

    python -m sluice.benchmarks.schema_change --out rounds [--rounds 5] [--seconds 20]

A round is one run of `make demo-schema` with a seed of its own. It wants a quiet machine.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo import schema_change
from sluice.common.program import run, say
from sluice.common.settings import parse, setting


@dataclass(frozen=True, kw_only=True)
class SchemaRounds:
    """The number of rounds, and their size."""

    out: Path = setting(Path("schema-rounds"), "folder for the rounds", metavar="DIR")
    rounds: int = setting(5, "paired rounds", least=1)
    seconds: float = setting(20.0, "how long each run goes on after the change", above=0)


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(
        SchemaRounds,
        argv,
        "python -m sluice.benchmarks.schema_change",
        description=__doc__,
    )
    ratios = []
    for seed in range(1, args.rounds + 1):
        found = schema_change.main(
            f"--out {args.out / str(seed)} --seconds {args.seconds} --seed {seed}".split()
        )
        ratios.append(found["with_agent"]["rows"] / found["without"]["rows"])
        say(f"round {seed}: {ratios[-1]:.2f} times the rows with the agent")
    return {"ratios": ratios, "median": statistics.median(ratios), "lowest": min(ratios)}


if __name__ == "__main__":
    run(main)
