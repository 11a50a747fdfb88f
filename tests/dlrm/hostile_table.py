"""A table that names a function of a module of its own, which no program may import unless its user says so."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.common.program import run
from tests.dlrm import clicks_table
from tests.dlrm.rig import ROOT, command, environment, run_words

MODULE = "features_of_a_table"
CODE = """
from os.path import basename
from pathlib import Path
Path({mark!r}).touch()
def halved(values):
    import pyarrow.compute as pc
    return pc.divide(values, 2.0)
"""
SPEC = clicks_table.spec_text(
    features=clicks_table.FEATURES.replace(
        '{op = "fill", value = 0}, {op = "clip", low = -2}, {op = "log", shift = 3}]',
        f'{{op = "python", function = "{MODULE}:halved", inputs = "number", output = "number"}}, '
        '{op = "fill", value = 0}]',
    )
)


def make(folder: Path) -> None:
    """Writes the table into `folder`, and a run over it."""
    table = folder / "table"
    table.mkdir()
    (table / f"{MODULE}.py").write_text(CODE.format(mark=str(folder / "mark")))
    sys.path.insert(0, str(table))
    try:
        clicks_table.write(table, clicks_table.raw_rows(2000), text=SPEC)
    finally:
        sys.path.remove(str(table))
    assert (folder / "mark").exists()  # its maker ran it: the test can tell
    forget(folder)
    # The trainer begins in the table's folder: Python itself puts the folder that it is started in on its path.
    more = "--batch-size 256 --tuning fixed --allow-code another.module"
    words = command(0, "dlrm.train", *run_words(folder, more))
    process = subprocess.run(
        words,
        capture_output=True,
        text=True,
        cwd=table,
        check=False,
        timeout=120,
        env={**environment(folder), "PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert not (folder / "mark").exists(), "training ran what the table names"


def forget(folder: Path) -> None:
    (folder / "mark").unlink(missing_ok=True)
    sys.modules.pop(MODULE, None)


def ended(main: Callable[[list[str]], Any], *words: object) -> int:
    with pytest.raises(SystemExit) as end:
        run(main, argv=[str(word) for word in words])
    return int(end.value.code or 0)
