"""The process that Spark's Python workers are forked from. It imports what they need.

In local mode it replaces `pyspark.daemon`, because each worker would take a third of a second for these imports."""

from __future__ import annotations

import gc
import os

from pyspark.daemon import manager

import sluice.etl.spark.fit
import sluice.etl.spark.write  # noqa: F401
from sluice.etl.apply.compiled_lines import load

if __name__ == "__main__":
    if "SLUICE_COMPILED" in os.environ:  # `open_session` sets it for large inputs
        load()
    # A worker collects garbage after each task. It need not look at all modules then.
    gc.freeze()
    manager()  # type: ignore[no-untyped-call]
