"""Continues a run after its table has changed."""
