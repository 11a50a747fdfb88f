"""Runs the trainer, from its command line to its result."""
