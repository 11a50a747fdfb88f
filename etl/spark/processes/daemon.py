"""The process that Spark's Python workers are forked from, with all that they are going to import: in local mode it is
started in place of `pyspark.daemon`, as each worker would take a third of a second to import the same anew."""

from __future__ import annotations

from pyspark.daemon import manager

import sluice.etl.spark.fit
import sluice.etl.spark.write
import sluice.etl.table.new_files  # noqa: F401

if __name__ == "__main__":
    manager()  # type: ignore[no-untyped-call]
