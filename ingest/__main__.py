"""`python -m ingest bench`, `headroom` and `doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.runs import RunError
from etl.program import UsageError, run
from etl.table import TableError
from ingest import bench, doctor, headroom_command
from ingest.arguments import ArgumentError
from ingest.columns import ColumnError
from ingest.faults import FaultError
from ingest.governor import MemoryLimitError
from ingest.headroom import HeadroomError
from ingest.knobs import KnobError, nearest
from ingest.loader import LoaderError
from ingest.parquet import ParquetError
from ingest.pipeline import PipelineError
from ingest.plan import PlanError
from ingest.source import SourceError
from ingest.transform import TransformError

COMMANDS = {"bench": bench.main, "doctor": doctor.main, "headroom": headroom_command.main}
INPUT_ERRORS = (TableError, RunError, ColumnError, MemoryLimitError, KnobError, LoaderError, PipelineError, PlanError,
                SourceError, ParquetError, HeadroomError, ArgumentError, TransformError, FaultError)
USAGE = """\
usage: python -m ingest COMMAND …

commands:
  bench TABLE      load a feature table as a trainer would, and say how fast
  headroom TABLE   would faster loading help, and where?
  doctor [TABLE]   is this machine, and this table, fit for loading?

python -m ingest COMMAND --help tells more."""


def main(argv: list[str]) -> Mapping[str, Any] | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return None
    if argv[0] not in COMMANDS:
        raise UsageError(f"no command {argv[0]!r}{nearest(argv[0], COMMANDS)}")
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    run(main, input_errors=INPUT_ERRORS)
