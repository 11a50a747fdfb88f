"""Processes around a Spark session: the parent of the Python workers, and a cluster on one machine."""
