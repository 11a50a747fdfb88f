"""`check_text`: refuses text files that are damaged, have another header, or that only Spark can read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from sluice.common.errors import InputError
from sluice.etl.apply.input_checks import HEAD, TAIL, fault, refuse_faults, refuse_header
from sluice.etl.read.input_paths import InputFile
from sluice.etl.read.pieces import SPARK_ONLY, first_line
from sluice.etl.spec.input_section import Input


def check_text(
    files: Sequence[InputFile],
    source: Input,
    map_files: Callable[[Callable[[InputFile], Any], Sequence[InputFile]], Iterable[Any]],
) -> None:
    """Raises an InputError that names the first file with a fault. `map_files` calls a function on many files."""
    for file in files:
        if file.path.endswith(SPARK_ONLY):
            raise InputError(
                f"{file.name}: is compressed in a way that Spark alone reads; run it with --engine spark"
            )
    packed = [file for file in files if file.name.endswith((".gz", ".bz2"))]
    refuse_faults(zip([f.name for f in packed], map_files(_find_fault, packed), strict=True))
    if source.header:
        first = partial(first_line, encoding=source.encoding)
        for file, line in zip(files, map_files(first, files), strict=True):
            refuse_header(file.name, line, source)


def _find_fault(file: InputFile) -> str | None:
    with file.open() as stream:
        head = stream.read(min(file.size, HEAD))
        stream.seek(max(0, file.size - TAIL))
        return fault(file.name, head, stream.read(TAIL))
