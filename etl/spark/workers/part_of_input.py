"""Names the part of the input at which a worker failed: `name_part` adds it to a message, `split_part` reads it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from sluice.etl.apply.failure import FeatureError
from sluice.etl.apply.parse import Batches

_PART = re.compile(r" \(in part (\d+) of the input\)")


def name_part(work: Callable[..., Batches]) -> Callable[..., Batches]:
    """Decorates a function that processes one part of the input in a worker. If an operator fails, its message also
    names the part."""

    @functools.wraps(work)
    def with_part(*arguments: Any, **named: Any) -> Batches:
        try:
            yield from work(*arguments, **named)
        except FeatureError as failure:
            from pyspark import TaskContext

            if (task := TaskContext.get()) is None:
                raise
            raise FeatureError(
                f"{failure} (in part {task.partitionId()} of the input)"
            ) from failure

    return with_part


def split_part(message: str) -> tuple[str, int | None]:
    """Returns a message without the part, and the part's number, if the message has one."""
    found = _PART.search(message)
    return _PART.sub("", message), int(found[1]) if found else None
