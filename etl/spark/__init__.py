"""The stages of the job on Spark: the only folder that imports Spark."""
