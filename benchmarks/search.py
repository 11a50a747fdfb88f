"""Compares the search of examples/search.py with a plain random search: how soon does each reach an AUC?

    python -m benchmarks.search --data TABLE --work DIR --auc 0.83 [--seeds 6]

Both searches draw from the same ranges, and every trial ends when it reaches the AUC. The example proposes settings by
TPE, and ends poor trials early. The plain search draws settings at random, and trains each to its end. For each seed,
the two run one after the other, in turns of who is first. An evaluation is a ninth of an epoch, so the number of
evaluations does not depend on what else the machine does. The seconds do.

The aim, fixed beforehand: a third of the seconds of the plain search, as the median over the seeds.
"""

from __future__ import annotations

import importlib.util
import statistics
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna

from benchmarks.results import ROOT, table
from sluice.common.program import run, say
from sluice.common.settings import parse, setting

TRIALS = 30


@dataclass(frozen=True, kw_only=True)
class SearchRounds:
    """The table, the AUC to reach, and the number of seeds."""

    data: str = setting(help="feature table", metavar="TABLE")
    work: Path = setting(Path("search-rounds"), "folder for the searches", metavar="DIR")
    auc: float = setting(0.83, "the AUC that a search must reach", above=0)
    seeds: int = setting(6, "pairs of searches", least=1)


def load_example() -> ModuleType:
    """Returns examples/search.py as a module of its own, so that each arm has its own constants."""
    spec = importlib.util.spec_from_file_location("search_example", ROOT / "examples/search.py")
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def search(options: SearchRounds, *, seed: int, plain: bool) -> dict[str, float]:
    """Runs one search until it reaches the AUC. Returns what it cost."""
    example = load_example()
    if plain:
        example.PAUSES = ()
    words = ["--data", options.data, "--stop-auc", str(options.auc)]
    out = options.work / f"{'plain' if plain else 'example'}-{seed}"
    made = example.Search(out, words, seed=seed, auc=options.auc)
    if plain:
        made.study.sampler = optuna.samplers.RandomSampler(seed=seed)
    made.run(TRIALS, None)
    trials = made.study.trials
    folders = {trial.user_attrs["folder"] for trial in trials}
    return {
        "reached": made.reached,
        "trials": len(trials),
        "evaluations": sum(len(example.read_aucs(Path(folder))) for folder in folders),
        "seconds": sum(trial.user_attrs.get("seconds", 0.0) for trial in trials),
    }


def main(argv: list[str]) -> dict[str, Any]:
    options = parse(SearchRounds, argv, "python -m benchmarks.search", description=__doc__)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows = []
    for seed in range(options.seeds):
        arms = (False, True) if seed % 2 else (True, False)
        cost = {plain: search(options, seed=seed, plain=plain) for plain in arms}
        row = {
            "seed": seed,
            **{f"example {name}": value for name, value in cost[False].items()},
            **{f"plain {name}": value for name, value in cost[True].items()},
            **{
                f"{name} ratio": round(cost[False][name] / cost[True][name], 2)
                for name in ("evaluations", "seconds")
            },
        }
        say(str(row))
        rows.append(row)
    say(table(rows))
    return {
        "pairs": len(rows),
        "evaluations": statistics.median(row["evaluations ratio"] for row in rows),
        "seconds": statistics.median(row["seconds ratio"] for row in rows),
        "reached": all(row["example reached"] and row["plain reached"] for row in rows),
    }


if __name__ == "__main__":
    run(main)
