"""A spec at work on Arrow batches, without Spark: shared by Spark's workers, the loader and the server."""
