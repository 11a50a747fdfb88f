"""Applies a spec to Arrow batches, without Spark: shared by Spark's workers, the loader and the server."""
