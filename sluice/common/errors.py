"""The base classes of a user's mistakes. Standard library only, because every package uses this file."""

from __future__ import annotations


class UsageError(ValueError):
    """A user's mistake. The message names what is wrong and what to do.

    A program prints the message in one line and ends with 2 (`sluice.common.program`).
    """


class RunFailure(RuntimeError):
    """A run that cannot be finished. A program prints the message without a traceback, and ends with 1."""


class OperatorError(UsageError):
    """Invalid parameters of an operator, or a function of a spec that may not be imported. The
    message names the parameter and what to write."""


class InputError(UsageError):
    """Input that cannot be read. The message names the path and what is wrong."""
