"""Says whether a faster loader would help, and where: `sluice headroom TABLE`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from sluice.agent.runtime.knob_memory import KNOBS
from sluice.etl.common.arguments import ArgumentParser
from sluice.etl.common.errors import UsageError
from sluice.etl.common.program import say
from sluice.etl.spec import code_options
from sluice.ingest.loader import BatchLoader
from sluice.ingest.options import function_of, roles_of
from sluice.ingest.read.parquet_files import table_of
from sluice.ingest.tools.headroom import measure

_EXAMPLES = """\
examples:
  sluice headroom data/clicks --step-ms 5
  sluice headroom 'logs/*.parquet' --roles 'label=click;dense=I*' --step mine.model:train_step
"""


def main(argv: list[str]) -> Mapping[str, Any]:
    parser = ArgumentParser(
        prog="sluice headroom", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Times the consumer alone on cached batches, loading alone (files in memory, and not), and both "
                            "together; says which of them holds the other up, and what one more worker would bring.")
    add = parser.add_argument
    add("table", help="a feature table, or any folder, glob or file of Parquet")
    add("--batch-size", type=int, default=8192, help="rows of a batch (default %(default)s)")
    add("--seconds", type=float, default=3.0, help="of each of seven measurements (default %(default)s)")
    add("--split", default="train", help="which part of the table (default %(default)s)")
    add("--roles", metavar="ROLE=NAME,…;…", help="of the columns of plain Parquet (default: guessed, and printed)")
    add("--knobs", default="", metavar="NAME=N,…", help=f"where the knobs start: {KNOBS}")
    add("--step-ms", type=float, default=0.0, help="how long the consumer takes for a batch (default %(default)s)")
    add("--step", metavar="MODULE:FUNCTION", help="the consumer itself: a function of a batch")
    code_options.add_options(parser)
    arguments = parser.parse_args(argv)
    if arguments.seconds <= 0 or arguments.step_ms < 0:
        raise UsageError("--seconds is positive and --step-ms not below 0")
    if arguments.step and arguments.step_ms:
        raise UsageError("--step or --step-ms: only one of them can be the consumer")

    def sleep(_batch: Any) -> None:
        if arguments.step_ms:
            time.sleep(arguments.step_ms / 1000)

    step = function_of(arguments.step, "--step")[1] if arguments.step else sleep
    table = table_of(arguments.table, roles_of(arguments.roles), code_options.given(arguments))
    files = [file.path for file in table.files_of(arguments.split)]
    with BatchLoader(table, batch_size=arguments.batch_size, split=arguments.split, epochs=sys.maxsize) as loader:
        loader.apply(loader.knobs.parse(arguments.knobs))
        found = measure(loader, step, seconds=arguments.seconds, files=files)
    say(str(found))
    return found.to_dict()
