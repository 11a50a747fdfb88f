"""`python -m sluice.agent.lab.judge`: compares policies in pairs on drawn pipelines or shipped scenarios.

Each pipeline is one pair: both policies run it with the same seed, against the same clairvoyant reference. Results are
kept in a folder, by the digest of the code that made them, so the command goes on where it stopped. `--before` pairs
the first policy with results that an earlier version of it left in such a folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sluice.agent.lab.yardsticks import describe, make_policy
from sluice.common.lines import say
from sluice.common.program import run as program
from sluice.common.settings import parse, setting

if TYPE_CHECKING:
    from sluice.agent.lab.simulator.scenario import Scenario

_AGENT = Path(__file__).resolve().parent.parent
_CODE = {
    "auto": ("tuner", "costs"),
}
"""Policy → the folders of the agent whose code decides for it. Results of other code are not used again."""
_POINT = 0.01
_DRAWS = 4000


@functools.cache
def digest(policy: str) -> str:
    """Returns a digest of the code of a policy, and of the simulator with its scenarios."""
    folders = (*_CODE.get(policy, ("policies",)), "lab/simulator")
    files = [p for f in folders for p in sorted((_AGENT / f).rglob("*")) if p.is_file()]
    kept = [p for p in files if p.suffix in (".py", ".json")]
    return hashlib.sha256(b"".join(p.read_bytes() for p in kept)).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class ResultStore:
    """Keeps the results of simulated runs as JSON files in a folder."""

    folder: Path

    def get(self, policy: str, case: str, make: Callable[[], Any]) -> Any:
        """Returns the result of a policy in a case. It is made if this code has not made it yet."""
        path = self.folder / digest(policy) / policy / file_of(case)
        if path.exists():
            return json.loads(path.read_text())
        result = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
        return result


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """The options of `python -m sluice.agent.lab.judge`."""

    title = "what"
    policy: tuple[str, ...] = setting(
        ("auto", "plumber"), "these policies; the others are compared with the last", again=True
    )
    split: str = setting(
        "held out", "family of drawn pipelines: held out, hidden or training", metavar="SPLIT"
    )
    first: int = setting(0, "number of the first drawn pipeline", least=0)
    count: int = setting(
        0, "drawn pipelines; each second one changes. 0: shipped scenarios", least=0
    )
    scenario: tuple[str, ...] = setting(
        (), "these scenarios alone (docs/scenarios.md)", metavar="FILE", again=True
    )
    python: bool = setting(False, "only pipelines of pure Python that may run in processes")
    folder: Path = setting(Path("build/judge"), "keeps the results", metavar="DIR")
    before: Path | None = setting(
        None, "compare with these earlier results (DIR/DIGEST/POLICY)", metavar="FOLDER"
    )


def file_of(case: str) -> str:
    """Returns the name of the file with the result of a case."""
    return "".join(c if c.isalnum() else "-" for c in case) + ".json"


def scenarios(options: JudgeOptions) -> list[tuple[Scenario, int]]:
    """Returns the scenarios with their seeds."""
    from sluice.agent.lab.simulator.random_pipelines import pipeline
    from sluice.agent.lab.simulator.scenario_json import load, shipped

    if not options.count:
        chosen = [load(path) for path in options.scenario] or shipped()
        return [(scenario, 0) for scenario in chosen]
    drawn: list[tuple[Scenario, int]] = []
    number = options.first
    while len(drawn) < options.count:
        scenario = pipeline(options.split, number, changing=number % 2 == 1)
        if not options.python or any(s.lock and len(s.backends) > 1 for s in scenario.stages):
            drawn.append((scenario, number))
        number += 1
    return drawn


def run_one(policy: str, scenario: Scenario, seed: int, store: ResultStore) -> Mapping[str, Any]:
    """Returns the scores of one policy in one scenario."""
    from sluice.agent.lab.simulator.rollout import reference, run

    case = _case(scenario, seed)

    def go_best() -> dict[str, Any]:
        best = reference(scenario, seed=seed)
        return {"rows": best.rows, "first": sum(best.rates[:10])}

    def go() -> dict[str, Any]:
        began, looks = time.process_time(), []
        outcome = run(
            scenario, make_policy(policy, scenario), seed=seed, observe=lambda *_: looks.append(1)
        )
        return {
            "score": outcome.rows / max(1e-9, best["rows"]),
            "first": sum(outcome.rates[:10]) / max(1e-9, best["first"]),
            "killed": outcome.killed,
            "changes": outcome.changes,
            "ms": 1000 * (time.process_time() - began) / max(1, len(looks)),
        }

    best = store.get("reference", case, go_best)
    found: Mapping[str, Any] = store.get(policy, case, go)
    return found


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    """Returns the object for the last line of output."""
    options = parse(
        JudgeOptions, argv, "python -m sluice.agent.lab.judge", description=describe(__doc__)
    )
    store, names = ResultStore(options.folder), options.policy
    rows, cases = [], scenarios(options)
    for scenario, seed in cases:
        rows.append({name: run_one(name, scenario, seed, store) for name in names})
        told = (f"{r['score']:.3f} {r['first']:.2f} {r['changes']:3d}" for r in rows[-1].values())
        say(f"{scenario.name[:36]:36s} {' | '.join(told)}")
    figures = {}
    for name in names:
        scores = np.array([row[name]["score"] for row in rows])
        figures[name] = {
            "mean": float(scores.mean()),
            "median": float(np.median(scores)),
            "p5": float(np.percentile(scores, 5)),
            "first_10_s": float(np.mean([row[name]["first"] for row in rows])),
            "killed": sum(row[name]["killed"] for row in rows),
            "changes": float(np.mean([row[name]["changes"] for row in rows])),
            "ms_a_look": float(np.mean([row[name]["ms"] for row in rows])),
        }
        say(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in figures[name].items()))
    pairs = {name: _compare(name, names[-1], rows) for name in names[:-1]}
    if options.before is not None:
        earlier = [_earlier(options.before, *case) for case in cases]
        both = [row | {"before": old} for row, old in zip(rows, earlier, strict=True) if old]
        say(f"{len(both)} of {len(rows)} cases have an earlier result")
        pairs |= {"before": _compare(names[0], "before", both)} if both else {}
    return {"policies": figures, "pairs": pairs, "simulated": True}


def _case(scenario: Scenario, seed: int) -> str:
    return f"{scenario.name} {seed}"


def _earlier(folder: Path, scenario: Scenario, seed: int) -> Mapping[str, Any] | None:
    """Returns the scores of a case in a folder of earlier results. None: it has none."""
    path = folder / file_of(_case(scenario, seed))
    scores: Mapping[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return scores


def _compare(name: str, other: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Prints and returns how much better a policy is than another one, by pairs."""
    gained = [row[name]["score"] - row[other]["score"] for row in rows]
    mean, low, high = (100 * value for value in _with_bounds(gained))
    worse = sum(g < -_POINT for g in gained) / len(gained)
    say(
        f"{name} − {other}: {mean:+.2f} points ({low:+.2f} to {high:+.2f}); "
        f"{100 * worse:.0f} % are worse by more than a point"
    )
    return {"mean": mean, "low": low, "high": high, "worse": worse}


def _with_bounds(differences: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean difference of pairs, and the ends of its 95 % interval, by drawing the pairs anew."""
    pairs = np.asarray(differences)
    means = np.random.default_rng(0).choice(pairs, (_DRAWS, len(pairs))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(pairs.mean()), float(low), float(high)


if __name__ == "__main__":
    program(main)
