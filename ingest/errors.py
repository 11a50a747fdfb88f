"""The root of a user's mistakes that a loader meets. Standard library only."""

from __future__ import annotations

from sluice.common.errors import UsageError


class LoadingError(UsageError):
    """A mistake in what is loaded, or in how a loader was asked: found at the start, or in the middle of an epoch.

    A program that does more than load counts it among the failures of its run."""
