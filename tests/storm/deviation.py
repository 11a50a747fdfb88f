"""What a storm looks for: `Deviation`."""

from __future__ import annotations


class Deviation(AssertionError):
    """Not the twin's rows, an account that does not add up, or something left behind."""
