"""The checks of `sluice doctor`. Each yields `Finding`s about this machine, a table, or leftovers of dead runs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec

import numpy as np
import psutil

from sluice.common import extras
from sluice.common.errors import UsageError
from sluice.common.native import LIBRARY, KernelError, require_kernel
from sluice.etl.spec.code_options import CodeOptions
from sluice.ingest.columns import ColumnError, Columns
from sluice.ingest.knobs import format_bytes
from sluice.ingest.machine import Machine
from sluice.ingest.options import table_named
from sluice.ingest.plain.roles import GuessError
from sluice.ingest.process import child
from sluice.ingest.process.shared_memory import SharedMemoryError
from sluice.ingest.process.worker import WorkerError, WorkerProcess
from sluice.ingest.read.files import FileOpener
from sluice.ingest.read.kept_files import first_schema
from sluice.ingest.read.parquet_files import ParquetFiles, located_of

_REQUIREMENT = re.compile(r"([\w-]+)(?:.*[>=]=([0-9.]+))?[^;]*(?:; extra == \"(\w+)\")?")
_SMALL = 2**30
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


def check_versions() -> Iterator[Finding]:
    """Compares the installed packages with those that this distribution requires."""
    yield Finding("python", platform.python_version())
    seen = set[str]()
    for text in metadata.requires(extras.DISTRIBUTION) or ():
        name, lowest, extra = re.match(_REQUIREMENT, text).groups()  # type: ignore[union-attr]
        if name in {*seen, extras.DISTRIBUTION, "fbgemm-gpu"}:  # its CPU build has another name
            continue
        seen.add(name)
        command = extras.install_command(extra) if extra else f"pip install -U {name}"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "not installed", None if extra else False, command)
            continue
        well = _numbers(version) >= _numbers(lowest or "")
        yield Finding(name, version, well, f"{lowest} or newer is needed: {command}")


def check_kernel() -> Iterator[Finding]:
    """Looks for the compiled inner loops, which the loader needs."""
    try:
        require_kernel()
    except KernelError as error:
        yield Finding("inner loops", "cannot be used", False, str(error))
    else:
        yield Finding("inner loops", f"compiled: {LIBRARY}")


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", version.split("+")[0])]


def check_training() -> Iterator[Finding]:
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


def check_machine() -> Iterator[Finding]:
    machine = Machine()
    yield Finding("machine", f"{machine.model()}, {platform.platform()}")
    cores, host = machine.cores(), os.cpu_count() or 1
    yield Finding(
        "cores",
        f"{cores:g} of the host's {host}",
        None if cores < host else True,
        "an affinity or a quota takes the others",
    )
    limit, used = machine.memory_limit(), machine.memory_used()
    yield Finding(
        "memory limit",
        f"{format_bytes(limit)}, {format_bytes(used)} in use by this process",
        limit >= _SMALL,
        "below 1 GiB only small batches fit: see what `sluice bench --memory-limit` prints",
    )
    waited = machine.memory_pressure()
    yield Finding(
        "memory pressure",
        f"{waited:g} % of the last 10 s",
        waited <= _PRESSED,
        "tasks wait for memory: another program takes it",
    )


def check_workers() -> Iterator[Finding]:
    """Starts a worker process, and sends it an array through shared memory."""
    try:
        with WorkerProcess("builtins:dict", deaths=1) as worker:
            worker.call({"array": np.zeros(1)})
            yield Finding("process workers", "start")
    except (WorkerError, SharedMemoryError, OSError) as error:
        yield Finding("process workers", str(error).splitlines()[0], False, "use backend=thread")


def check_table(uri: str, code: CodeOptions) -> Iterator[Finding]:
    """Checks a feature table, or plain Parquet with the columns of a given spec or those that a loader would take."""
    try:
        table = table_named([uri], None, code)
        first_schema(table.files, FileOpener(), located_of(table))  # reads a file
        rows = sum(file.rows for file in table.files)
        yield Finding(
            "table", f"version {table.version}, {rows:,} rows in {len(table.files)} files"
        )
        if isinstance(table, ParquetFiles):
            columns = Columns.of(table.fields, table.fill, table.bags)
            table.check(columns)
            roles = Counter(field.role for field in table.fields)
            counted = ", ".join(f"{count} {role}" for role, count in roles.items())
            yield Finding("columns", f"a loader takes {counted}")
    except (GuessError, ColumnError) as error:
        well = None if isinstance(error, GuessError) and not code.own_spec else False
        yield Finding("columns", str(error), well, "a loader needs roles= or spec=")
    except (UsageError, OSError) as error:
        yield Finding("table", str(error), False)


def check_orphans(clean: bool) -> Iterator[Finding]:
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
    text = f"{len(orphans)}{removed}: {shown}"
    yield Finding(what, text, clean, "sluice doctor --clean removes them")


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
