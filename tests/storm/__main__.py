"""`make storm SEEDS=N [FIRST=M]` and `make storm SEED=N`: runs of the loader under schedules and faults that a seed
draws. See docs/storm.md."""

import argparse
import json
import os
import sys
import time

from tests.storm.runs import Finding, Sum, described, run_seeds

_SHOWN = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument("--first", type=int, default=0, metavar="M", help="the first of them (0)")
    parser.add_argument("--seed", type=int, metavar="N", help="this one alone, with its trace")
    parser.add_argument(
        "--processes",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="how many processes (one for each core)",
    )
    parser.add_argument(
        "--tables", action="store_true", help="runs of a table instead: jobs, a vacuum, readers"
    )
    options = parser.parse_args()
    if options.seeds < 1 or options.processes < 1:
        parser.error(
            f"--seeds {options.seeds}, --processes {options.processes}: each is at least 1"
        )
    if options.seed is not None:
        return replay(options.seed, options.tables)
    return many(options.first, options.seeds, options.processes, options.tables)


def many(first: int, count: int, processes: int, tables: bool) -> int:
    """Progress and findings go to standard error, the sum to standard output."""
    began, total, findings, told = time.monotonic(), Sum(), list[Finding](), 0.0
    try:
        for part, findings_of_part in run_seeds(
            range(first, first + count), min(processes, count), tables
        ):
            total += part
            for finding in findings_of_part:
                print(
                    f"\nseed {finding.seed} deviates:\n{finding.text}replay it with: make storm SEED={finding.seed}"
                    f"{' TABLES=1' if tables else ''}",
                    file=sys.stderr,
                )
            findings += findings_of_part
            spent = time.monotonic() - began
            if spent > told + 5 or total.seeds == count:
                told = spent
                left = spent / total.seeds * (count - total.seeds)
                print(
                    f"{total.seeds} of {count} seeds in {spent:.0f} s, {total.deviations} deviate; "
                    f"{left:.0f} s to go",
                    file=sys.stderr,
                )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(
        json.dumps(
            {
                **total.to_dict(),
                "first": first,
                "seconds": round(time.monotonic() - began, 1),
                "deviating": [f.seed for f in findings],
            }
        )
    )
    return 1 if findings else 0


def replay(seed: int, tables: bool) -> int:
    """One seed: what it drew, the end of its trace, and what it found."""
    began = time.monotonic()
    run, text = described(seed, tables)
    if run is not None:
        print(
            f"seed {seed}: {run.case}\n{run.way}\n{run.steps} steps, {run.now:.3f} s on its clock; the last "
            f"{_SHOWN}:",
            file=sys.stderr,
        )
        for line in run.story(_SHOWN):
            print(f"  {line}", file=sys.stderr)
    print(text or "no deviation", file=sys.stderr)
    print(
        json.dumps(
            {
                "seeds": 1,
                "deviations": int(bool(text)),
                "seed": seed,
                "trace": run.digest() if run else None,
                "steps": run.steps if run else 0,
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )
    return 1 if text else 0


if __name__ == "__main__":
    raise SystemExit(main())
