"""`make fuzz SECONDS=600 [FIRST=n] [SEED=n] [ONLY=four_ways]`: specs and rows from seeds, in all ways that must agree.

Progress and findings go to standard error. The last line of standard output is JSON. The exit status is 1 if anything
was found. With SEED one seed runs, and its specs are shown and kept. Without FIRST the seeds begin with the one that
the code draws (`tests.fuzz.seeds`), as in the tests.
"""

import argparse
import importlib
import itertools
import json
import pkgutil
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import tests.fuzz
from tests.fuzz.seeds import seed_of_code

_EVERY_S = 10.0


def modules() -> dict[str, ModuleType]:
    """The fuzzers, by their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(tests.fuzz.__path__))
    loaded = [
        importlib.import_module(f"tests.fuzz.{name}")
        for name in names
        if name != "__main__" and not name.startswith("test_")
    ]
    return {module.NAME: module for module in loaded if hasattr(module, "try_seed")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, metavar="N", help="begin new seeds for so long")
    parser.add_argument("--seeds", type=int, metavar="N", help="run so many seeds of each fuzzer")
    parser.add_argument(
        "--first", type=int, metavar="N", help="the first seed (the code draws one)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="run this seed alone, and show what it draws"
    )
    parser.add_argument(
        "--only", choices=[*modules()], metavar="NAME", help=f"one of {', '.join(modules())}"
    )
    options = parser.parse_args()
    chosen = {name: module for name, module in modules().items() if options.only in (None, name)}
    if options.seed is not None:
        return try_seeds(chosen, options.seed, 1, None, shown=True)
    first = seed_of_code() if options.first is None else options.first
    seconds = options.seconds if options.seconds is not None or options.seeds is not None else 60.0
    return try_seeds(chosen, first, options.seeds, seconds)


def try_seeds(
    chosen: dict[str, ModuleType],
    first: int,
    seeds: int | None,
    seconds: float | None,
    *,
    shown: bool = False,
) -> int:
    """Tries so many seeds, or for so long. With `shown`, the specs of each are shown and kept."""
    began = told = time.monotonic()
    counts = {name: {"seeds": 0, "findings": 0} for name in chosen}
    failing: dict[str, list[int]] = {name: [] for name in chosen}
    numbers = itertools.count() if seeds is None else range(seeds)
    for seed, name in ((first + number, name) for number in numbers for name in chosen):
        folder = Path(tempfile.mkdtemp(prefix=f"sluice-fuzz-{name}-"))
        findings_of_seed = chosen[name].try_seed(seed, folder)
        for path in sorted(folder.glob("*.toml")) if shown else ():
            print(f"---- {path}\n{path.read_text()}", file=sys.stderr)
        if not shown:
            shutil.rmtree(folder)
        counts[name]["seeds"] += 1
        counts[name]["findings"] += len(findings_of_seed)
        for finding in findings_of_seed:
            print(f"{name}, seed {seed}: {finding}", file=sys.stderr)
        if findings_of_seed:
            failing[name].append(seed)
            print(f"replay it with: make fuzz SEED={seed} ONLY={name}", file=sys.stderr, flush=True)
        now = time.monotonic()
        if now > told + _EVERY_S:
            told = now
            print(f"{now - began:.0f} s: {counts}", file=sys.stderr, flush=True)
        if seconds is not None and now > began + seconds:
            break
    tried, findings = (
        sum(count[key] for count in counts.values()) for key in ("seeds", "findings")
    )
    spent = round(time.monotonic() - began, 1)
    last = {"seeds": tried, "findings": findings, "seconds": spent, "first": first}
    print(json.dumps({**last, "modules": counts, "failing": failing}))
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
