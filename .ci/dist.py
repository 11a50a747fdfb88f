"""Writes what Spark's workers need of Sluice into one zip file: `python .ci/dist.py build/sluice.zip`."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((ROOT / "sluice").rglob("*.py")):  # which follows no link
            archive.write(path, path.relative_to(ROOT))
        for path in sorted((ROOT / "etl").rglob("*.py")):
            archive.write(path, Path("sluice", path.relative_to(ROOT)))
    unfinished.replace(target)
    print(os.path.relpath(target))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
