"""The root of a user's mistakes. Standard library only: every room uses it."""

from __future__ import annotations


class UsageError(ValueError):
    """A user's mistake: its message names what is wrong and what to do.

    A program that meets one says its message in one line and ends with 2 (`sluice.common.program`)."""


class InputError(UsageError):
    """Input that cannot be read: its message names the path, and what is wrong."""
