"""The process that Spark's Python workers are forked from. It imports what they need.

In local mode it replaces `pyspark.daemon`, because each worker would take a third of a second for these imports."""

from __future__ import annotations

import gc

from pyspark.daemon import manager

import sluice.etl.spark.fit
import sluice.etl.spark.write  # noqa: F401

if __name__ == "__main__":
    # A worker collects garbage after each task. It need not look at all modules then.
    gc.freeze()
    manager()  # type: ignore[no-untyped-call]
