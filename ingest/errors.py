"""The base class of a loader's errors that a user can correct. Standard library only."""

from __future__ import annotations

from sluice.common.errors import UsageError


class LoadingError(UsageError):
    """A mistake in the data or in a loader's arguments. It may be found at the start or in the middle of an epoch.

    A program that does more than load counts it as a failure of its run."""
