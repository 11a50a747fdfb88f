"""The commands `sluice bench`, `headroom` and `doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from sluice.agent.report.run_folder import RunError
from sluice.etl.common.program import UsageError, run
from sluice.etl.table.table import TableError
from sluice.ingest.columns import ColumnError
from sluice.ingest.faults.faults import FaultError
from sluice.ingest.knobs import KnobError, nearest
from sluice.ingest.loader import LoaderError
from sluice.ingest.memory.governor import MemoryLimitError
from sluice.ingest.options import ArgumentError
from sluice.ingest.pipeline import PipelineError
from sluice.ingest.read.parquet_files import ParquetError
from sluice.ingest.read.reader import SourceError
from sluice.ingest.row_order import PlanError
from sluice.ingest.stages.transform import TransformError
from sluice.ingest.tools import bench, doctor, headroom_cli
from sluice.ingest.tools.headroom import HeadroomError

COMMANDS = {"bench": bench.main, "doctor": doctor.main, "headroom": headroom_cli.main}
INPUT_ERRORS = (TableError, RunError, ColumnError, MemoryLimitError, KnobError, LoaderError, PipelineError, PlanError,
                SourceError, ParquetError, HeadroomError, ArgumentError, TransformError, FaultError)
USAGE = """\
usage: sluice COMMAND …

commands:
  bench TABLE      load a feature table as a trainer would, and say how fast
  headroom TABLE   would faster loading help, and where?
  doctor [TABLE]   is this machine, and this table, fit for loading?

sluice COMMAND --help tells more."""


def main(argv: list[str]) -> Mapping[str, Any] | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return None
    if argv[0] not in COMMANDS:
        raise UsageError(f"no command {argv[0]!r}{nearest(argv[0], COMMANDS)}")
    return COMMANDS[argv[0]](argv[1:])


def program() -> NoReturn:
    """Runs the whole program, as its command does."""
    run(main, input_errors=INPUT_ERRORS)


if __name__ == "__main__":
    program()
