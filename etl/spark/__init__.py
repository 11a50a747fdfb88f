"""The job's stages on Spark: the only folder that imports it."""
