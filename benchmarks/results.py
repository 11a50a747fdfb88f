"""Long measurements in pieces: `Results`, a file of JSON lines that keeps each one; `Cases`, of which each runs in a
process of its own; `run_python`, which measures a program; and `table`, which prints figures."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Results:
    """What was measured, by what was asked. A run that was cut short goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self._path, self._measured = path, {}
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._measured[_name(entry["asked"])] = entry["found"]

    def once(self, asked: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """What was found for this question, measured now if it never was."""
        name = _name(asked)
        if name not in self._measured:
            measured = measure()
            with self._path.open("a") as file:
                file.write(json.dumps({"asked": asked, "found": measured}) + "\n")
            self._measured[name] = measured
        return self._measured[name]


class Cases:
    """Measurements by name, each by a function of a benchmark in a process of its own, and a line of the file. One that
    failed is a line with its error, and is measured again when the benchmark runs again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        self._known = {line["case"] for line in lines if "error" not in line}

    def run(
        self,
        name: str,
        module: str,
        function: str,
        arguments: Mapping[str, Any],
        *,
        python: str = sys.executable,
    ) -> None:
        """`benchmarks.module.function(**arguments)`, unless it is known; its dict is printed and kept."""
        if name in self._known:
            return
        code = (
            f"import json, sys\nfrom benchmarks import {module}\n"
            f"print(json.dumps({module}.{function}(**json.loads(sys.argv[1]))))"
        )
        done = subprocess.run(
            [python, "-c", code, json.dumps(arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        outcome = (
            json.loads(done.stdout.splitlines()[-1])
            if done.returncode == 0
            else {"error": done.stderr[-2000:]}
        )
        line = json.dumps({"case": name, **outcome})
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


def _name(asked: Mapping[str, Any]) -> str:
    return json.dumps(asked, sort_keys=True)


def run_python(*words: object, python: str | Path = sys.executable) -> dict[str, Any]:
    """Runs a Python program in the checkout's root. Returns the JSON of its last line as `last`, its seconds, its
    processor seconds and its peak memory."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(
            [str(python), *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=errors,
        )
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, errors):
            file.seek(0)
        if process.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, words[:3]))} ended with {process.returncode}: {errors.read()[-2000:]}"
            )
        last = json.loads(out.read().splitlines()[-1])
    return {
        "last": last,
        "seconds": seconds,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss // 1024,
    }


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal keys as a table for people and for pages."""
    if not rows:
        return "(nothing)"
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        names,
        ["---"] * len(names),
        *[[_shown(row.get(name, "")) for name in names] for row in rows],
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
