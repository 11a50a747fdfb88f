"""Decides which rank holds which tables, and has TorchRec do so."""
