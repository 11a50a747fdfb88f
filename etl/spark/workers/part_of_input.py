"""Which part of the input a worker's failure is about: `naming_part` has it say so, `part_in` reads that."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from sluice.etl.apply.failure import FeatureError
from sluice.etl.apply.parse import Batches

_SAID = re.compile(r" \(in part (\d+) of the input\)")


def naming_part(work: Callable[..., Batches]) -> Callable[..., Batches]:
    """In a worker: what goes over one part of the input, and says which if an operator fails."""

    @functools.wraps(work)
    def named(*words: Any) -> Batches:
        try:
            yield from work(*words)
        except FeatureError as failure:
            from pyspark import TaskContext

            if (task := TaskContext.get()) is None:
                raise
            raise FeatureError(
                f"{failure} (in part {task.partitionId()} of the input)"
            ) from failure

    return named


def part_in(said: str) -> tuple[str, int | None]:
    """What was said without the part, and the part's number, if there is one."""
    found = _SAID.search(said)
    return _SAID.sub("", said), int(found[1]) if found else None
