"""The errors of loading that a user can correct, and `warn`. Standard library only."""

from __future__ import annotations

from sluice.common.errors import UsageError
from sluice.common.lines import say


class LoadingError(UsageError):
    """A mistake in the data or in a loader's arguments. It may be found at the start or in the middle of an epoch.

    A program that does more than load counts it as a failure of its run."""


class LoaderError(LoadingError):
    """A loader cannot do what was asked. The message says what to do instead."""


class SourceError(LoadingError):
    """A file cannot be read. The message names the file and the row group."""


def warn(line: str) -> None:
    """Prints a line on standard error."""
    say(f"sluice: {line}")


class Closed(Exception):
    """A thread worked on or waited for something that was closed meanwhile. No row is the cause."""


class NoWorkerAnswers(Exception):
    """No remote worker answers. The caller does the work itself."""
