"""Describes how a checkpoint stores tensors: in safetensors files, and layout.json says where each piece of a tensor
is.

Each rank writes its pieces into its own file. A reader takes any box of a tensor from the pieces that the box touches.
So any number of ranks can read a checkpoint. No part is a pickle."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice.dlrm.checkpoint.disk import CheckpointDisk
from sluice.dlrm.checkpoint.host_pieces import HostPieces
from sluice.dlrm.checkpoint.meta import LAYOUT, CheckpointError

FORMAT = 1
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a tensor, and the file that holds it."""

    first: tuple[int, ...]
    """The first index of the box in each dimension."""
    size: tuple[int, ...]
    file: str
    name: str
    """The name of the piece in that file."""

    def __post_init__(self) -> None:
        if Path(self.file).name != self.file or self.file in ("", ".", ".."):
            raise ValueError(f"{self.file!r} is no name of a file in the checkpoint's own folder")
        if len(self.first) != len(self.size) or min((*self.first, *self.size), default=0) < 0:
            raise ValueError(f"a piece of {self.size} elements from {self.first} on is none")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, and the pieces in which it is stored."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if len(chunk.size) != len(self.size) or any(
                a + b > c for a, b, c in zip(chunk.first, chunk.size, self.size, strict=True)
            ):
                raise ValueError(
                    f"a piece of {chunk.size} elements from {chunk.first} on is none of a tensor of "
                    f"{self.size}"
                )


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A piece of a tensor to be written. `value()` returns it when it is written."""

    key: str
    dtype: torch.dtype
    tensor_size: tuple[int, ...]
    """The size of the tensor that this is a piece of."""
    first: tuple[int, ...]
    size: tuple[int, ...]
    value: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of layout.json."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]
    """All values that are not tensors, as JSON."""

    def to_json(self) -> str:
        tensors = {
            key: {
                "dtype": NAMES[stored.dtype],
                "size": stored.size,
                "chunks": [[c.first, c.size, c.file, c.name] for c in stored.chunks],
            }
            for key, stored in self.tensors.items()
        }
        return json.dumps({"format": FORMAT, "tensors": tensors, "values": self.values})

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Reads a folder's layout.json. Raises CheckpointError if it is missing or invalid."""
        try:
            found = json.loads((folder / LAYOUT).read_text())
            if found["format"] != FORMAT:
                raise ValueError(
                    f"its format is {found['format']!r}, and this program reads {FORMAT}"
                )
            return cls(
                {
                    key: StoredTensor(
                        TYPES[stored["dtype"]],
                        tuple(stored["size"]),
                        tuple(
                            TensorChunk(tuple(a), tuple(b), c, d) for a, b, c, d in stored["chunks"]
                        ),
                    )
                    for key, stored in found["tensors"].items()
                },
                dict(found["values"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"checkpoint {folder}: {LAYOUT} cannot be read: {type(error).__name__}: {error}"
            ) from None

    @classmethod
    def joined(cls, ranks: Iterable[Mapping[str, Any]], values: Mapping[str, Any]) -> Index:
        """Makes one index from what `write` returned on each rank. Raises ValueError if a part of a tensor is
        missing."""
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[TensorChunk]]] = {}
        for rank in ranks:
            for key, dtype, tensor_size, first, size, name in rank["pieces"]:
                stored = tensors.setdefault(key, (TYPES[dtype], tuple(tensor_size), []))
                stored[2].append(TensorChunk(tuple(first), tuple(size), rank["file"], name))
        for key, (_, tensor_size, chunks) in tensors.items():
            elements = sum(math.prod(chunk.size) for chunk in chunks)
            if elements != math.prod(tensor_size):
                raise ValueError(
                    f"{key} has {math.prod(tensor_size)} elements, and the ranks hold {elements}"
                )
        return cls(
            {
                key: StoredTensor(dtype, tensor_size, tuple(chunks))
                for key, (dtype, tensor_size, chunks) in tensors.items()
            },
            values,
        )


def write(
    files: CheckpointDisk,
    folder: Path,
    file: str,
    entries: Sequence[TensorEntry],
    host: HostPieces | None = None,
) -> dict[str, Any]:
    """Writes these pieces as a safetensors file. Returns the `file`, its checksum `sum` and the `pieces` in it, for the
    index. `host` brings tensors of a device to the host."""
    header: dict[str, Any] = {}
    pieces = []
    at = 0
    for number, entry in enumerate(entries):
        name = f"{number} {entry.key}"
        end = at + entry.bytes
        header[name] = {"dtype": NAMES[entry.dtype], "shape": entry.size, "data_offsets": [at, end]}
        pieces.append(
            [entry.key, NAMES[entry.dtype], entry.tensor_size, entry.first, entry.size, name]
        )
        at = end
    checksum = 0

    def summed() -> Iterator[Any]:
        nonlocal checksum
        for part in _bytes(header, entries, host or HostPieces()):
            checksum = zlib.crc32(part, checksum)
            yield part

    files.write(folder / file, summed())
    return {"file": file, "sum": checksum, "pieces": pieces}


def _bytes(
    header: Mapping[str, Any], entries: Sequence[TensorEntry], host: HostPieces
) -> Iterator[Any]:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for entry in entries:
        value = entry.value()
        if value.dtype != entry.dtype or value.numel() != math.prod(entry.size):
            raise ValueError(
                f"{entry.key} is {value.dtype} {tuple(value.shape)} instead of {entry.dtype} {entry.size}"
            )
        for piece in host.pieces(value):
            yield piece.numpy().data


def overlap(
    first: Sequence[int], size: Sequence[int], chunk: TensorChunk
) -> tuple[list[slice], list[slice]] | None:
    """Returns the part that a box shares with a chunk, as slices of the box and of the chunk. None: they share
    nothing."""
    in_box = []
    in_chunk = []
    for start, length, other, other_length in zip(
        first, size, chunk.first, chunk.size, strict=True
    ):
        low, high = max(start, other), min(start + length, other + other_length)
        if low >= high:
            return None
        in_box.append(slice(low - start, high - start))
        in_chunk.append(slice(low - other, high - other))
    return in_box, in_chunk
