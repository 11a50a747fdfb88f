"""All tests, in four processes side by side. Many tests wait for what they started, so fewer processes leave the two
cores idle.

    python -m tests                 everything, as `make test` runs it
    python -m tests tests/etl -x    what pytest is told, in one process

The output of the first part is shown as it comes, the output of the others at the end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
PROCESSES = 4
LONG_FOLDERS = ("etl", "dlrm", "ingest", "e2e")
"""Folders that are a part of their own, the longest first. The last part has everything else."""


class Parts:
    """Runs parts of the tests until an interrupt."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()

    def run(self, paths: Sequence[Path], output: IO[bytes] | None) -> int:
        """Returns pytest's exit status for these folders and files."""
        if self.interrupted.is_set():
            return 130
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", *map(str, paths)]
        status = subprocess.run(
            command, stdout=output, stderr=output and subprocess.STDOUT, check=False
        ).returncode
        seconds = time.monotonic() - began
        print(f"{name_part(paths)}: {seconds:.0f} s, exit status {status}", file=sys.stderr)
        return status


def find_parts() -> list[list[Path]]:
    """Every folder and file with tests, in one of the parts."""
    found = sorted(
        path
        for path in HERE.iterdir()
        if path.name.startswith("test_") or (path / "__init__.py").exists()
    )
    others = [path for path in found if path.name not in LONG_FOLDERS]
    return [*([HERE / name] for name in LONG_FOLDERS), others]


def name_part(paths: Sequence[Path]) -> str:
    return f"tests/{paths[0].name}" if len(paths) == 1 else "other tests"


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 if all passed."""
    if arguments:
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode
    parts = Parts()
    # The running tests get the interrupt, too, and end by it.
    signal.signal(signal.SIGINT, lambda *_: parts.interrupted.set())
    first, *others = find_parts()
    with ExitStack() as opened, ThreadPoolExecutor(PROCESSES - 1) as pool:
        outputs = [opened.enter_context(tempfile.TemporaryFile()) for _ in others]
        running = [
            pool.submit(parts.run, paths, output)
            for paths, output in zip(others, outputs, strict=True)
        ]
        statuses = [parts.run(first, None)]
        for future, output in zip(running, outputs, strict=True):
            statuses.append(future.result())
            output.seek(0)
            sys.stdout.buffer.write(output.read())
            sys.stdout.buffer.flush()
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
