"""Estimates a job's time and memory here by running it on the first rows of its input: `Estimate`.

The local engine runs the job three times in its own folder: once to warm up, then on a quarter of the rows and on all
of them. The difference separates the cost of a row from the fixed cost of a job."""

from __future__ import annotations

import importlib.util
import io
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from sluice.common.machine import memory_limit, processors, this_machine
from sluice.etl.engines import opened
from sluice.etl.jobs.job import Job
from sluice.etl.jobs.job_run import run_job
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable

ROWS = 60_000
ERROR = 0.3
"""How far off the processor time may be, as a share. The elapsed time also depends on other work of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """One measured job."""

    rows: int
    seconds: float
    cpu_s: float
    bytes: int
    """The most memory that Arrow used for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the local engine needs for the whole input."""

    rows: int
    seconds: float
    row_s: float
    cpu_s: float
    memory: int
    processors: int

    @classmethod
    def of(cls, few: Took, many: Took, *, share: float, base_bytes: int, limit: int) -> Estimate:
        """Returns the estimate for a whole input. `many` had this `share` of it. `base_bytes` is the memory of the
        process before the job. A job stores at most half of the memory `limit`, because it has a budget."""
        rows, more = round(many.rows / share), many.rows - few.rows
        row_s = max(1e-9, (many.seconds - few.seconds) / more)
        row_cpu_s = max(0.0, (many.cpu_s - few.cpu_s) / more)
        row_bytes = max(0.0, (many.bytes - few.bytes) / more)
        stored = min(row_bytes * rows, limit / 2)
        return cls(
            rows=rows,
            row_s=row_s,
            seconds=max(0.0, few.seconds - few.rows * row_s) + rows * row_s,
            cpu_s=max(0.0, few.cpu_s - few.rows * row_cpu_s) + rows * row_cpu_s,
            memory=int(base_bytes + max(0.0, few.bytes - few.rows * row_bytes) + stored),
            processors=processors(),
        )

    def pays(self, spark: Mapping[str, Any] | None) -> str:
        """Returns a line on the number of rows from which Spark is faster. `spark` is the cost of a Spark job on this
        machine, if there was one."""
        if spark is None:
            return (
                "Spark: its time is not known, because no Spark job on this machine has written to this table; it "
                "pays on more machines, or where joins need it"
            )
        row_s = spark["seconds"] / max(1.0, spark["rows"])
        ratio = row_s / self.row_s
        if ratio < 1:
            return (
                f"Spark: {row_s * 1e6:.1f} µs a row in its last job here, less than local's "
                f"{self.row_s * 1e6:.1f}: it pays from {spark['start_s'] / (self.row_s - row_s):,.0f} rows on"
            )
        start = spark["start_s"]
        text = (
            f"Spark: {row_s * 1e6:.1f} µs a row in its last job here and {start:.0f} s to start, local "
            f"{self.row_s * 1e6:.1f}: it pays here at no size"
        )
        machines = 2 * ratio
        return f"{text}; on {machines:.0f} machines like this one from {start / (self.row_s / 2):,.0f} rows on"


def estimate_job(job: Job, clock: Callable[[], float] = time.perf_counter) -> Estimate | None:
    """Runs the job on samples, and returns the estimate. None without a local engine, or if it cannot sample the
    input."""
    if importlib.util.find_spec("sluice.etl.local") is None:
        return None
    from sluice.etl.local.sample import cut_sample

    took: list[Took] = []
    share, base = 1.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with tempfile.TemporaryDirectory(prefix="sluice-estimate-") as work:
        for number, rows in enumerate((ROWS // 4, ROWS // 4, ROWS)):
            folder = Path(work) / str(number)
            folder.mkdir()
            if (
                found := cut_sample(job.spec.input, job.inputs, folder, rows, processors())
            ) is None:
                return None
            count, share = found
            took.append(_run_sample(job, folder, Path(work) / f"table-{number}", count, clock))
    if took[-1].rows <= took[-2].rows:  # the smaller sample is already the whole input
        share, took[-2] = 1.0, replace(took[-2], rows=0, seconds=0.0, cpu_s=0.0, bytes=0)
    return Estimate.of(took[-2], took[-1], share=share, base_bytes=base, limit=memory_limit())


def _run_sample(job: Job, folder: Path, table: Path, rows: int, clock: Callable[[], float]) -> Took:
    sample = Job(spec=job.spec, inputs=(str(folder),), store=TableStore(table), max_rejects=1.0)
    before = pa.total_allocated_bytes()
    began = clock()
    used = time.process_time()
    with opened("local", sample.inputs, JobProgress(io.StringIO())) as engine_for:
        run_job(sample, engine_for(sample))
    return Took(
        rows=rows,
        seconds=clock() - began,
        cpu_s=time.process_time() - used,
        bytes=max(0, (pa.default_memory_pool().max_memory() or before) - before),
    )


def last_spark_job(job: Job) -> Mapping[str, Any] | None:
    """Returns the cost of this table's newest Spark job on this machine, from its record."""
    if job.base.version is None:
        return None
    table = FeatureTable.open(job.store.uri, job.base.version)
    done = [
        record
        for record in table.records.values()
        if record.engine == "spark" and record.took.get("machine") == this_machine()
    ]
    return max(done, key=lambda record: record.version).took if done else None


def lines_of(found: Estimate, record: Mapping[str, Any] | None) -> list[str]:
    """Returns the estimate as text."""
    here = (
        f"local: {found.rows:,} rows in about {found.seconds:.0f} s on {found.processors} processors, if they stay "
        f"as busy as now ({found.cpu_s:.1f} s of processor time, ± {ERROR:.0%}), and {found.memory / 2**20:,.0f} "
        f"MiB: {found.row_s * 1e6:.1f} µs a row, measured on the first {ROWS:,}"
    )
    return [here, found.pays(record)]
