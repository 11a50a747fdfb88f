"""Finds this rank's parts of a table, or of its optimiser's state: `local_parts`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def local_parts(value: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    """Returns each part with its first index in the full tensor. A tensor that is not sharded is one part."""
    if not is_sharded(value):
        return [((0,) * value.dim(), value.detach())]
    return [
        (
            tuple(part.metadata.shard_offsets),
            part.tensor.detach().view(tuple(part.metadata.shard_sizes)),
        )
        for part in value.local_shards()
    ]


def is_sharded(value: Any) -> bool:
    """Whether ranks hold different parts of a tensor."""
    return hasattr(value, "local_shards")
