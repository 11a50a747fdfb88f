"""Limits the memory of a pipeline."""
