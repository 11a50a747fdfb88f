"""Chooses what decodes row groups (`source_of`): a `RowGroupReader` alone, or Petastorm's worker in front of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

from sluice.common.extras import install_command
from sluice.common.suggest import NamedFields
from sluice.ingest.choices import AUTO, READERS
from sluice.ingest.errors import SourceError, warn
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.petastorm.options import PetastormOptions
from sluice.ingest.read.petastorm.source import PetastormSource
from sluice.ingest.read.reader import RowGroupReader

RowGroupSource = RowGroupReader | PetastormSource
"""Makes the work of the workers that decode row groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(NamedFields):
    """How files are read. All ways give the same rows."""

    reader: str | None = None
    """`petastorm` or `arrow`. None: for a feature table, a predicate or a TransformSpec, Petastorm if it is installed;
    else Arrow."""
    files: FileOpener | None = field(default=None, repr=False)
    """Opens remote files, with other retries. The loader closes it."""
    petastorm: PetastormOptions = PetastormOptions()
    """What Petastorm's Reader is asked for: a predicate."""


@cache
def reader_of(name: str | None) -> str:
    """Returns the named reader, or the default. The default is Petastorm. If it is not installed, the default is Arrow,
    and a line on standard error says so once."""
    if name not in (None, AUTO):
        return str(name)
    with suppress(ModuleNotFoundError):
        if find_spec("petastorm"):
            return "petastorm"
    warn(
        "row groups are read by the plain Arrow reader, because petastorm is not installed; the rows "
        "and their order are the same"
    )
    return "arrow"


def source_of(reader: str | None, groups: RowGroupReader, predicate: Any = None) -> RowGroupSource:
    """Makes the source that a user names, or, for None and `auto`, the default one."""
    reader = reader_of(reader)
    if reader not in READERS:
        raise SourceError(f"reader {reader!r} is not one of {', '.join(READERS)}")
    if reader == "arrow":
        if predicate is not None:
            raise SourceError("predicate: this is Petastorm's; take reader='petastorm'")
        return groups
    try:
        return PetastormSource(groups, predicate)
    except ModuleNotFoundError as error:
        raise SourceError(
            f"reader {reader!r} needs {error.name}, which is not installed: "
            f"{install_command('petastorm')}, or take reader='arrow', which gives the same rows"
        ) from None
