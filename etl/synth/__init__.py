"""Synthetic raw logs and tables."""
