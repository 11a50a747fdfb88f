"""The parts of a table, or of its optimiser's state, that lie on this rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def local_parts(value: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    """Where each part begins in the whole tensor, and the part itself. A tensor that is not sharded is one part."""
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
