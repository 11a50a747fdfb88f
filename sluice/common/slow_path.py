"""A local path that is read as if it were in a slow store: `latency://60ms/ABSOLUTE/PATH`."""

from __future__ import annotations

import re
from typing import NamedTuple

from sluice.common.errors import UsageError

_SCHEME = "latency://"
_FORM = re.compile(r"(\d+(?:\.\d+)?)(ms|s)(/.*)", re.DOTALL)


class SlowPath(NamedTuple):
    """The parts of such a path."""

    prefix: str
    """`latency://60ms`."""
    path: str
    delay_ms: float


def slow_path(uri: str) -> SlowPath | None:
    """Returns the parts of such a path. None for any other path, also for `latency://ROOT?OPTIONS`, which disturbs a
    store in more ways. Raises a UsageError for a `latency://` path of neither form."""
    if not uri.startswith(_SCHEME):
        return None
    rest = uri.removeprefix(_SCHEME)
    if not rest or rest.startswith("/") or "://" in rest:
        return None
    form = _FORM.fullmatch(rest)
    if form is None or not form[3].strip("/"):
        raise UsageError(
            f"{uri}: write latency://60ms/ABSOLUTE/PATH, a delay in ms or s and an absolute path of this "
            "machine"
        )
    return SlowPath(
        f"{_SCHEME}{form[1]}{form[2]}", form[3], float(form[1]) * (1000 if form[2] == "s" else 1)
    )


def plain_path(uri: str) -> str:
    """Returns the path without the delay. Other paths stay as they are."""
    slow = slow_path(uri)
    return uri if slow is None else slow.path
