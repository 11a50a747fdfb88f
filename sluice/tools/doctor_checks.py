"""The checks of `sluice doctor`. Each yields `Finding`s about this machine, a table's files, or leftovers of dead runs.

Page headers show whether the pages of a Parquet file have checksums; no reader reports it. Without checksums a flipped
bit is returned as data, also from compressed pages.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common import extras
from sluice.common.errors import UsageError
from sluice.etl.spec.code_options import CodeOptions
from sluice.etl.table.table_files import TableFiles
from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.knobs import format_bytes
from sluice.ingest.machine import Machine
from sluice.ingest.options import table_named
from sluice.ingest.plain.footer_chunks import chunks_of_group, thrift_numbers
from sluice.ingest.plain.roles import ROLES
from sluice.ingest.process import child
from sluice.ingest.process.shared_memory import Region, SharedMemoryError
from sluice.ingest.process.worker import WorkerError, WorkerProcess
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.parquet_files import GuessError, ParquetFiles, is_table, parquet_paths

_HEAD_BYTES, _HEAD_NUMBERS = 2**16, 128  # more than the head of a page takes
_CRC = 4  # the field of a page's head that has the checksum


def chunks_with_crc(file: pa.NativeFile, metadata: pq.FileMetaData) -> tuple[int, int]:
    """Counts the column chunks of the first and the last row group whose first page has a checksum, and all their
    chunks."""
    having = total = 0
    numbers = np.empty((_HEAD_NUMBERS, 2), np.int64)
    for group in sorted({0, metadata.num_row_groups - 1} - {-1}):
        for chunk in chunks_of_group(metadata, group):
            file.seek(chunk.start)
            head = np.frombuffer(file.read(_HEAD_BYTES), np.uint8)
            count, _ = thrift_numbers(np.uint64(head.ctypes.data), 0, len(head), numbers)
            having += bool((numbers[: max(count, 0), 0] == _CRC).any())
            total += 1
    return having, total


# (package, lowest version, who needs it). Older torch and pyarrow run code from files that they are given.
PACKAGES = (
    ("numpy", "2", ""),
    ("pyarrow", "18", ""),
    ("zlib-ng", "1", ""),
    ("torch", "2.8", ""),
    ("deltalake", "1.6", "feature tables"),
    ("petastorm", "0.12.1", "reader=petastorm"),
    ("pyspark", "4.1", "the ETL job"),
    ("torchrec", "1.5", "the trainer"),
    ("fsspec", "", "other stores than local and s3"),
)
_NEEDED_FILES = 1024
_SMALL = 2**30
_FILES = 8
_PRESSED = 10.0


@dataclass(slots=True)
class Finding:
    """The result of a check. `well` is None if there is nothing to judge. Advice is dropped if all is well."""

    what: str
    value: str
    well: bool | None = True
    advice: str = ""

    def __post_init__(self) -> None:
        if self.well:
            self.advice = ""


def versions() -> Iterator[Finding]:
    python = platform.python_version()
    new = sys.version_info >= (3, 11)
    yield Finding("python", python, new, "Python 3.11 or newer is needed")
    for package, lowest, use in PACKAGES:
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            yield Finding(
                package,
                "not installed",
                None if use else False,
                f"only needed for {use}" if use else f"pip install '{package}>={lowest}'",
            )
            continue
        well = _number(found) >= _number(lowest)
        advice = f"{lowest} or newer is needed: pip install -U {package}"
        yield Finding(package, found, well, advice)


def training() -> Iterator[Finding]:
    """Imports what training imports, if torchrec is installed."""
    if find_spec("torchrec") is None:
        return
    try:
        import_module("torchrec")
    except (ImportError, OSError) as error:
        advice = extras.advice(error, "train") or extras.install_command("trainer")
        yield Finding("training", f"torchrec cannot be imported: {error}", False, advice)
    else:
        yield Finding("training", "torchrec can be imported")


def _number(version: str) -> list[int]:
    """Returns the numbers of a version."""
    return [int(digits) for digits in re.findall("[0-9]+", version.split("+")[0])]


def machine(found: Machine) -> Iterator[Finding]:
    cores, host = found.cores(), os.cpu_count() or 1
    yield Finding(
        "cores",
        f"{cores:g} of the host's {host}",
        None if cores < host else True,
        "an affinity or a quota takes the others",
    )
    limit, used = found.memory_limit(), found.memory_used()
    yield Finding(
        "memory limit",
        f"{format_bytes(limit)}, {format_bytes(used)} in use by this process",
        limit >= _SMALL,
        "below 1 GiB only small batches fit: see what `sluice bench --memory-limit` prints",
    )
    waited = found.memory_pressure()
    yield Finding(
        "memory pressure",
        f"{waited:g} % of the last 10 s",
        waited <= _PRESSED,
        "tasks wait for memory: another program takes it",
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= _NEEDED_FILES
    yield Finding("open files", str(files), enough, f"raise it: ulimit -n {_NEEDED_FILES * 4}")


def shared_memory() -> Iterator[Finding]:
    region = Region(lambda _: None)
    try:
        region.reserve(_SMALL // 64)
        yield Finding("shared memory", "memfd, reserved as needed")
    except (SharedMemoryError, OSError) as error:
        yield Finding(
            "shared memory", str(error), False, "process workers cannot run: use backend=thread"
        )
    finally:
        region.close()
    with contextlib.suppress(OSError):
        status = os.statvfs("/dev/shm")
        size = status.f_blocks * status.f_frsize
        yield Finding(
            "/dev/shm",
            format_bytes(size),
            None if size < _SMALL else True,
            "torch's own loaders and collectives use it: docker run --shm-size=2g",
        )


def workers() -> Iterator[Finding]:
    try:
        with WorkerProcess("builtins:dict", deaths=1) as worker:
            worker.start()
            yield Finding("process workers", "start")
    except (WorkerError, OSError) as error:
        yield Finding("process workers", str(error).splitlines()[0], False, "use backend=thread")


def table(uri: str, code: CodeOptions) -> Iterator[Finding]:
    """Checks a feature table, or a folder or pattern of Parquet files, with the columns of a given spec or those that a
    loader would take."""
    try:
        opened = table_named([uri], None, code)
    except (GuessError, ColumnError) as error:
        yield Finding(
            "columns",
            str(error),
            False if code.own_spec else None,
            "a loader needs roles= or spec=",
        )
        found, listed = parquet_paths(uri)
        yield _foreign(listed, f"{len(found)} Parquet files")
        yield from files(found, plain=True)
        return
    except (UsageError, OSError) as error:
        yield Finding(
            "table", str(error), False, "sluice show TABLE tells more" if is_table(uri) else ""
        )
        return
    paths = [file.path for file in opened.files]
    if isinstance(opened, ParquetFiles):
        rows = sum(file.rows for file in opened.files)
        yield _foreign(opened.table, f"{len(paths)} Parquet files of {rows:,} rows")
        count = Counter(field.role for field in opened.fields)
        roles = ", ".join(f"{count[role]} {role}" for role in ROLES if count[role])
        by = "the spec" if opened.spec is not None else "its guess"
        filled = f"; empty values of {', '.join(opened.fill)} become 0" if opened.fill else ""
        try:
            opened.check(Columns.of(opened.fields, opened.fill, opened.bags))
        except ColumnError as error:
            yield Finding("columns", str(error), False)
        else:
            yield Finding("columns", f"a loader takes {roles} by {by}{filled}")
    else:
        yield Finding(
            "table", f"version {opened.version}, {opened.rows:,} rows in {len(paths)} files"
        )
    yield from files(paths, plain=isinstance(opened, ParquetFiles))


def _foreign(table: TableFiles | None, files: str) -> Finding:
    """Reports what a source is that is no feature table."""
    if table is None:
        return Finding("table", f"{files}, no feature table", None)
    kind = f"{table.kind.capitalize()} table of another program"
    return Finding("table", f"{kind}, version {table.version}: {files}", None)


def files(paths: Sequence[str], *, plain: bool) -> Iterator[Finding]:
    """Checks the checksums of some files, spread over all. A feature table's files have checksums. Few other programs
    write them, so their absence is only reported."""
    chosen = paths[:: -(-len(paths) // _FILES)] if paths else []
    having = total = 0
    without = ""
    for path in chosen:
        try:
            with FileOpener().open_remote(path) as file, pq.ParquetFile(file) as parquet:
                found, of = chunks_with_crc(file, parquet.metadata)
        except (OSError, ValueError) as error:
            yield Finding(
                "file",
                f"{path}: {error}",
                False,
                "copy it here anew" if plain else "sluice check TABLE looks at every file",
            )
            continue
        having, total = having + found, total + of
        if found < of and not without:
            without = path
    if total:
        advice = f"{without} has none: a flipped bit would be read as data; "
        advice += (
            "to have them, write with page checksums (pyarrow: write_page_checksum=True)"
            if plain
            else "write it anew with page checksums"
        )
        every = "" if plain else " (sluice check TABLE reads them all)"
        passed: bool | None = True
        if without:
            passed = None if plain else False
        yield Finding(
            "checksums",
            f"present in {having} of {total} column chunks of {len(chosen)} files{every}",
            passed,
            advice,
        )


def leftovers(clean: bool) -> Iterator[Finding]:
    """Finds processes that dead runs left behind. Only these are ended."""
    what, orphans = "workers without a parent", [*_orphans()]
    if not orphans:
        yield Finding(what, "none")
        return
    for pid in orphans if clean else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    removed = " removed" if clean else ""
    shown = ", ".join(map(str, orphans[:5])) + (" …" if len(orphans) > 5 else "")
    found = f"{len(orphans)}{removed}: {shown}"
    yield Finding(what, found, clean, "sluice doctor --clean removes them")


def _orphans() -> Iterator[int]:
    """Finds our worker processes whose parent is not the one that started them. Processes in containers have other
    numbers and are left alone."""
    here = os.readlink("/proc/self/ns/pid")  # psutil knows no namespaces
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            owner = child.owner_of(process.cmdline())
            if (
                owner not in (None, process.ppid())
                and os.readlink(f"/proc/{process.pid}/ns/pid") == here
            ):
                yield process.pid
