"""All tests, in three processes side by side: many tests wait for what they started, and two processes leave a third of
two cores idle.

    python -m tests                 everything, as `make test` runs it
    python -m tests tests/etl -x    what pytest is told, in one process

What the first third says is shown as it comes, what the others say when they have ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
THIRDS = (("etl",), ("e2e", "ingest"))
"""These folders take about as long as all the others. What shares one session of Spark is together."""


def thirds() -> list[list[Path]]:
    """Every folder and file with tests, in one of three lists."""
    found = sorted(
        path
        for path in HERE.iterdir()
        if path.name.startswith("test_") or (path / "__init__.py").exists()
    )
    named = [[path for path in found if path.name in names] for names in THIRDS]
    return [*named, [path for path in found if not any(path in paths for paths in named)]]


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0 if all passed."""
    pytest = [sys.executable, "-m", "pytest"]
    if arguments:
        return subprocess.run([*pytest, *arguments], check=False).returncode
    first, *others = thirds()
    signal.signal(signal.SIGINT, lambda *_: None)  # all have it, too, and end by it
    with ExitStack() as files:
        beside = []
        for paths in others:
            said = files.enter_context(tempfile.TemporaryFile())
            beside.append(
                (subprocess.Popen([*pytest, *paths], stdout=said, stderr=subprocess.STDOUT), said)
            )
        status = subprocess.run([*pytest, *first], check=False).returncode
        for process, said in beside:
            status = process.wait() or status
            said.seek(0)
            sys.stdout.buffer.write(said.read())
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
