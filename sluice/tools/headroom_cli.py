"""Shows whether a faster loader would help, and where: `sluice headroom TABLE`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.agent.runtime.knob_options import KNOBS
from sluice.common.errors import UsageError
from sluice.common.program import say
from sluice.common.settings import parse, setting
from sluice.etl.spec.code_options import CodeOptions
from sluice.ingest.options import function_of, table_named

_EXAMPLES = """\
examples:
  sluice headroom data/clicks --step-ms 5
  sluice headroom 'logs/*.parquet' --roles 'label=click;dense=I*' --step mine.model:train_step
"""
_DESCRIPTION = (
    "Times the consumer alone on cached batches, loading alone (files in memory, and not), and both "
    "together; says which of them holds the other up, and what one more worker would bring."
)


@dataclass(frozen=True, kw_only=True)
class HeadroomOptions:
    """What is loaded, and which consumer takes the batches."""

    table: tuple[str, ...] = setting(
        help="a feature table, or any folder, glob or files of Parquet",
        metavar="TABLE",
        positional=True,
        several=True,
    )
    batch_size: int = setting(8192, "rows of a batch", least=1)
    seconds: float = setting(3.0, "of each of seven measurements", above=0)
    split: str = setting("train", "which part of the table", metavar="NAME")
    roles: str | None = setting(
        None,
        "roles of the columns of plain Parquet (default: guessed, and printed)",
        metavar="ROLE=NAME,…;…",
    )
    fill: float | None = setting(
        None,
        "what stands where a number is missing (default: an error; 0 if roles are guessed)",
        metavar="NUMBER",
    )
    knobs: str = setting("", f"where the knobs start: {KNOBS}", metavar="NAME=N,…")
    step_ms: float = setting(0.0, "how long the consumer takes for a batch", least=0)
    step: str = setting("", "the consumer itself: a function of a batch", metavar="MODULE:FUNCTION")
    code: CodeOptions = field(default_factory=CodeOptions)


def main(argv: list[str]) -> Mapping[str, Any]:

    arguments = parse(
        HeadroomOptions,
        argv,
        "sluice headroom",
        epilog=_EXAMPLES,
        description=_DESCRIPTION,
    )

    from sluice.ingest.loader import BatchLoader
    from sluice.tools.headroom import measure

    if arguments.step and arguments.step_ms:
        raise UsageError("--step or --step-ms: only one of them can be the consumer")

    def sleep(_batch: Any) -> None:
        if arguments.step_ms:
            time.sleep(arguments.step_ms / 1000)

    step = function_of(arguments.step, "--step")[1] if arguments.step else sleep
    table = table_named(arguments.table, arguments.roles, arguments.code)
    files = [file.path for file in table.files_of(arguments.split)]
    with BatchLoader(
        table,
        batch_size=arguments.batch_size,
        split=arguments.split,
        fill=arguments.fill,
        read_ahead_epochs=sys.maxsize,
    ) as loader:
        loader.apply(loader.knobs.parse(arguments.knobs))
        found = measure(loader, step, seconds=arguments.seconds, files=files)
    say(str(found))
    return found.to_dict()
