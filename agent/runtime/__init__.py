"""Connects the controller with a real run: its ranks, its machine, and the files that keep knobs."""
