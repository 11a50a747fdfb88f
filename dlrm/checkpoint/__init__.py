"""Writes and reads checkpoints on disk."""
