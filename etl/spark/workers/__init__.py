"""The parts of a pass that run in Spark's Python workers."""
