"""Runs Python programs for tests: `run_program`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_program(
    *words: object,
    cwd: Path = ROOT,
    check: bool = False,
    env: dict[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these words. After `timeout` seconds it is killed, and its test fails."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        check=check,
        env=env,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
