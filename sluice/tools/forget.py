"""Removes one value from a table and from runs: `sluice forget TABLE --key COLUMN=VALUE`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.common.errors import UsageError
from sluice.common.settings import parse, setting
from sluice.etl.spec.code_options import CodeOptions

_EXAMPLES = """\
examples:
  sluice forget table --key user=u4
  sluice forget table --key user=u4 --run run-1 --run run-2
"""
_DESCRIPTION = """Removes all that a table and runs hold of one value, such as a user who asks to be forgotten.

It publishes a version without the rows of that value and without its place in what operators learned. Then it removes
all older versions and all rejected rows. In runs, it clears the value's row of each embedding. The last line is a
receipt. If the command is killed, run it again."""


@dataclass(frozen=True, kw_only=True)
class ForgetOptions:
    """What is forgotten, and where."""

    table: str = setting(help="the table's folder or URI", metavar="TABLE", positional=True)
    key: str = setting(help="the value to forget, in a column of the input", metavar="COLUMN=VALUE")
    runs: tuple[Path, ...] = setting(
        (),
        "a run that was trained on the table; may be repeated",
        flags=("--run",),
        metavar="RUN",
        again=True,
    )
    shared: bool = setting(
        False, "also remove the rows of other values that have the same id, as after hash"
    )
    code: CodeOptions = field(default_factory=CodeOptions)


def main(argv: list[str]) -> Mapping[str, Any]:
    options = parse(
        ForgetOptions, argv, "sluice forget", epilog=_EXAMPLES, description=_DESCRIPTION
    )
    column, _, value = options.key.partition("=")
    if not (column and value):
        raise UsageError(f"--key {options.key!r}: write COLUMN=VALUE, for instance user=u4")
    from sluice.etl.jobs.erasure import Erasure
    from sluice.etl.table.store import TableStore

    erasure = Erasure(
        store=TableStore(options.table),
        column=column,
        value=value,
        permission=options.code.permission,
        shared=options.shared,
    )
    removed = erasure.publish(time.time())
    runs = {str(path): _clear_run(path, options.table, removed, value) for path in options.runs}
    return {"column": column, **erasure.finish(removed, time.time()), "runs": runs}


def _clear_run(run: Path, uri: str, removed: Mapping[str, Any], value: str) -> Mapping[str, Any]:
    from sluice.dlrm.checkpoint.clearing import clear_run
    from sluice.etl.table.table import FeatureTable

    table = FeatureTable.open(uri, removed["version"])
    return clear_run(run, removed["ids"], table, removed["before"], value)
