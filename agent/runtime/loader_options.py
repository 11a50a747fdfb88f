"""The options of a loader and of its agent, the same in all programs: `LoaderOptions`."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.common.settings import setting
from sluice.ingest.choices import AUTO, READERS
from sluice.ingest.knobs import parse_bytes

KNOBS = (
    "STAGE=N workers of it (decode, batch, and transforms by their names), fetch=64MiB in flight "
    "from a store, STAGE.backend=thread, process or, with --workers, remote, read_ahead_bytes=64MiB, "
    "prefetch_bytes=32MiB, several with commas between"
)


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How a process loads, bench or a rank of a training: with which reader, memory and first knobs, and where its best
    knobs are kept."""

    title = "input"
    reader: str = setting(
        AUTO,
        "who decodes; auto: petastorm where it is installed, else arrow",
        choices=(AUTO, *READERS),
    )
    memory_limit: int | None = setting(
        None,
        "what the process may use, one rank in a training, for instance 2GiB (default: what the machine and its "
        "control groups leave)",
        metavar="BYTES",
        parse=parse_bytes,
    )
    cores: int | None = setting(
        None, "the most that the loader uses, of one rank in a training (default: all)", metavar="N"
    )
    cache: str | None = setting(
        None,
        "keep what pure transforms make, for later epochs and runs (without a value: in the user's cache)",
        metavar="FOLDER",
        bare=AUTO,
    )
    cache_limit: int = setting(
        20 * 2**30, "the most that the cache keeps", metavar="BYTES", parse=parse_bytes
    )
    knobs: str = setting(
        "",
        f"where the knobs start: {KNOBS}; or a file that --save-knobs wrote",
        metavar="NAME=N,…|FILE",
    )
    save_knobs: str = setting(
        "", "write the best knobs of the run to a file, for --knobs", metavar="FILE"
    )
    registry: str | None = setting(
        None,
        "start where an earlier run on such a machine and schema settled, and keep where "
        "this one does (without a value: in the user's cache)",
        metavar="FOLDER|URI",
        bare="",
    )
