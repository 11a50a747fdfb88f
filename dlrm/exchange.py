"""What ranks say to each other: JSON, with the bytes of arrays and tensors after it. Nothing of it is unpickled."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_ARRAY = "an array"


def gather(value: Any, ranks: int, group: Any) -> list[Any]:
    """One small value of every rank, in the order of ranks, on every rank. A value is what JSON knows, numpy arrays and
    CPU tensors, in lists and in mappings with words for keys. Tuples arrive as lists, also from the rank itself."""
    mine = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    longest = int(max(sizes))
    parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=group)
    return [unpacked(part[:int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def packed(value: Any) -> bytes:
    """TypeError for what cannot be said."""
    tail: list[bytes] = []
    head = json.dumps(_plain(value, tail)).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *tail])


def unpacked(data: bytes) -> Any:
    """What `packed` was given."""
    at = 8 + int.from_bytes(data[:8], "little")
    return _whole(json.loads(data[8:at]), data[at:])


def _plain(value: Any, tail: list[bytes]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(inner, tail) for inner in value]
    if isinstance(value, dict) and _ARRAY not in value and all(isinstance(key, str) for key in value):
        return {key: _plain(inner, tail) for key, inner in value.items()}
    if isinstance(value, (np.ndarray, torch.Tensor)):
        array = value.numpy() if isinstance(value, torch.Tensor) else value
        if array.dtype.kind not in "biuf":
            raise TypeError(f"an array of {array.dtype} cannot be said to another rank")
        begin = sum(map(len, tail))
        tail.append(np.ascontiguousarray(array).tobytes())
        return {_ARRAY: [array.dtype.str, array.shape, begin, isinstance(value, torch.Tensor)]}
    raise TypeError(f"{type(value).__name__} {value!r} cannot be said to another rank")


def _whole(value: Any, tail: bytes) -> Any:
    if isinstance(value, list):
        return [_whole(inner, tail) for inner in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY not in value:
        return {key: _whole(inner, tail) for key, inner in value.items()}
    kind, shape, begin, tensor = value[_ARRAY]
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(tail, np.dtype(kind), count, begin).reshape(shape).copy()
    return torch.from_numpy(array) if tensor else array
