"""All tests, in two processes side by side: one would leave half of a machine of two cores idle.

    python -m tests                 everything, as `make test` runs it
    python -m tests tests/etl -x    what pytest is told, in one process

What the first half says is shown as it comes, what the second half says when it has ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
FIRST = ("etl", "e2e")
"""These folders take about as long as all the others: they have what starts Spark."""


def halves() -> tuple[list[Path], list[Path]]:
    """Every folder and file with tests, in one of two lists."""
    found = sorted(path for path in HERE.iterdir() if path.name.startswith("test_") or (path / "__init__.py").exists())
    return [p for p in found if p.name in FIRST], [p for p in found if p.name not in FIRST]


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 if both halves passed."""
    pytest = [sys.executable, "-m", "pytest"]
    if arguments:
        return subprocess.run([*pytest, *arguments], check=False).returncode
    first, second = halves()
    signal.signal(signal.SIGINT, lambda *_: None)  # both have it, too, and end by it
    with tempfile.TemporaryFile() as said:
        beside = subprocess.Popen([*pytest, *second], stdout=said, stderr=subprocess.STDOUT)
        status = subprocess.run([*pytest, *first], check=False).returncode
        other = beside.wait()
        said.seek(0)
        sys.stdout.buffer.write(said.read())
    return status or other


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
