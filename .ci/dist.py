"""Writes what Spark's workers need of Sluice into one zip file: `python .ci/dist.py build/sluice.zip`."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("sluice", "sluice/common", "sluice/etl")


def python_files(folder: Path) -> list[Path]:
    """Returns the Python files of a package that is itself a link or a folder; `sluice` without its packages."""
    if folder.name == "sluice":
        return sorted(folder.glob("*.py"))
    target = folder.resolve()
    return [folder / path.relative_to(target) for path in sorted(target.rglob("*.py"))]


def main(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
        for folder in FOLDERS:
            for path in python_files(ROOT / folder):
                archive.write(path, path.relative_to(ROOT))
    unfinished.replace(target)
    print(os.path.relpath(target))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
