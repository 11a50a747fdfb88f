"""`python -m tests.frozen write FILE` and `compare FILE`: see the package."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from tests.frozen.compare import differences
from tests.frozen.digest import readable

PARTS = ("loading", "tables", "training")
CORES = 4
"""Some defaults are the number of cores: all machines have as many here."""
PINNED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
}
"""Products of matrices are summed in the same order on all processors, as far as libraries let us ask for it."""


@contextlib.contextmanager
def pinned() -> Iterator[Path]:
    """Makes this process alike on all machines, and lends it a folder for temporary files and caches. It comes before
    the libraries are imported, since they look only then."""
    with tempfile.TemporaryDirectory(prefix="sluice-frozen-") as name:
        os.environ.update(PINNED, XDG_CACHE_HOME=f"{name}/cache", TMPDIR=name)
        tempfile.tempdir = name
        os.cpu_count = lambda: CORES
        yield Path(name)


def record(folder: Path) -> dict[str, Any]:
    """Returns what the sources do now, and works in that folder."""
    recorded = {"names": _record_part("names")}
    for part in PARTS:
        (folder / part).mkdir()
        recorded[part] = _record_part(part, folder / part)
    libraries = {name: metadata.version(name) for name in ("numpy", "pyarrow", "torch", "torchrec")}
    return {**recorded, "made with": {**libraries, "processor": _processor()}}


def _record_part(part: str, *folder: Path) -> Any:
    """Returns a part of the reference. Where it fails, the other parts are still compared."""
    try:
        return import_module(f"tests.frozen.{part}").record(*folder)
    except Exception as error:
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}"


def _processor() -> str:
    """Names the kind of processor, on which the last bits of a product depend: its flags and its model."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    flags = [flag for flag in ("avx2", "avx512f") if f" {flag} " in about]
    first = about.partition("\n\n")[0]
    model = re.findall(r"^(?:cpu family|model|stepping)\s*: (\d+)$", first, re.M)
    return " ".join([platform.machine(), *flags, *model])


def main(words: list[str]) -> int:
    if len(words) != 2 or words[0] not in ("write", "compare"):
        print("usage: python -m tests.frozen write FILE | compare FILE", file=sys.stderr)
        return 2
    task, path = words[0], Path(words[1])
    with pinned() as folder:
        now = record(folder)
    if task == "write":
        if failed := [part for part, value in now.items() if isinstance(value, str)]:
            print(f"nothing was written, as {' and '.join(failed)} failed", file=sys.stderr)
            return 1
        path.write_text(readable(now) + "\n", "utf-8")
        return 0
    differing = differences(json.loads(path.read_text("utf-8")), json.loads(readable(now)))
    print("\n".join(differing) or "no difference")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
