"""Runs Python programs for tests: `run_program`, `last_json`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_program(
    *words: object,
    cwd: Path = ROOT,
    check: bool = False,
    env: dict[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these words. After `timeout` seconds it is killed, and its test fails.

    With `check`, the test fails with the end of what the program wrote to standard error, if it did not end with 0."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        check=False,
        env=env,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    assert not check or done.returncode == 0, done.stderr[-4000:]
    return done


def last_json(process: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = process.stdout.strip().splitlines()
    assert lines, process.stderr[-3000:]
    return json.loads(lines[-1])
