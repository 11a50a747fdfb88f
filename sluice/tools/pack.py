"""`sluice pack SOURCE OUT`: rewrites Parquet in the layout that a loader reads fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sluice.common.settings import parse, setting

_DESCRIPTION = """Writes the rows of Parquet files, or of a version of a Delta or Iceberg table, to a new folder of
Parquet files. The rows keep their order, their row groups and their types. Nothing is compressed, and columns have
dictionaries where these take fewer bytes, so that a loader reads them fastest. Every program that reads Parquet
can read the files. The folder appears when all of them are written."""


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """What is packed, and where to."""

    source: str = setting(
        help="a folder, glob or file of Parquet, or a Delta or Iceberg table; TABLE@v3 is a version",
        metavar="SOURCE",
        positional=True,
    )
    out: str = setting(help="a new folder of this machine", metavar="OUT", positional=True)


def main(argv: list[str]) -> dict[str, Any]:
    options = parse(PackOptions, argv, "sluice pack", description=_DESCRIPTION)
    from sluice.tools.packed_files import pack

    return pack(options.source, options.out)
