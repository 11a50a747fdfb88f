"""`spark_errors_as_job_failure`: reports an error of Spark or of a disk in one line, without a trace."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from sluice.etl.jobs.engine import JobFailure, os_errors_as_job_failure

# For each known error, a pattern of Java's message, and what to do.
_KNOWN = (
    (r"No space left on device", "the disk is full: make room for output and spark.local.dir"),
    (
        r"Read-only file system|Permission denied",
        "see that this user may read the input, and write to the output and spark.local.dir",
    ),
    (
        r"OutOfMemoryError: (Java heap space|GC overhead)",
        "Spark needs more --driver-memory or --executor-memory",
    ),
    (
        r"No module named '?(pyarrow|numpy|etl)",
        "workers need pyarrow, numpy and --py-files build/sluice.zip",
    ),
)

_FAILURES = re.compile(r"^sluice\.etl\.jobs\.engine\.JobFailure: (.+)$", re.M)
"""Our own failures in a worker. Their messages are complete."""
_OURS = re.compile(r"^sluice\.[\w.]+: ")
"""The class name before one of our own messages, which needs none."""


@contextlib.contextmanager
def spark_errors_as_job_failure() -> Iterator[None]:
    """Turns the errors of Spark, and of this machine, into a `JobFailure`."""
    try:
        with os_errors_as_job_failure():
            yield
    except (PySparkException, Py4JError) as error:
        raise JobFailure(find_cause(str(error))) from error


def find_cause(text: str) -> str:
    """Returns the innermost cause in a trace of Java, of Python within Java, or of both."""
    if ours := _FAILURES.findall(text):
        return str(ours[-1])
    reading = re.search(r"while reading file (\S+?)\.?(?: |$)", text, re.M)
    file = f"{reading[1]}: " if reading else ""
    for pattern, words in _KNOWN:
        if match := re.search(pattern, text):
            return f"{file}{words} ({match[0]}); nothing was published"
    python = re.findall(r"^((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: .+)$", text, re.M)
    caused = re.findall(r"^Caused by: (.+)$", text, re.M)
    first = next((line for line in text.splitlines() if line.strip()), "Spark failed")
    own = [
        _OURS.sub("", line)
        for line in python
        if not line.startswith(("java.", "org.", "scala.", "py4j."))
    ]
    return f"{file}{(own or caused or [first])[-1].strip()}; nothing was published"
