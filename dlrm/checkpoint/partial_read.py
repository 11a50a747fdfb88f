"""Reads any parts of a checkpoint's tensors, without a process group: `CheckpointReader`, `TensorBox`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice.dlrm.checkpoint.finite import describe_tensors, not_finite
from sluice.dlrm.checkpoint.layout import Index, overlap
from sluice.dlrm.checkpoint.meta import LATEST, CheckpointError, NotFinite, complete_checkpoints

_TABLE = ".embedding_bags."


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a stored tensor, to be read into a tensor of the box's size."""

    key: str
    into: Tensor
    first: Sequence[int] | None = None
    """The first index of the box in each dimension. None: 0 in all."""


class CheckpointReader:
    """Reads the tensors of one checkpoint folder. Raises CheckpointError if it is damaged or removed meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = Index.read(path)
        self._tensors = index.tensors
        self.values = index.values

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """The size of every tensor. Weights have keys under `model.`, optimiser states under `tables.` and `dense.`"""
        return {key: stored.size for key, stored in self._tensors.items()}

    def read(self, pieces: Iterable[TensorBox]) -> None:
        """Fills all boxes, one file after the other. Raises NotFinite if the values hold NaN or infinity."""
        boxes = list(pieces)
        self._fill(boxes)
        if wrong := not_finite((box.key, box.into) for box in boxes):
            raise NotFinite(
                f"checkpoint {self.path} holds {describe_tensors(wrong)}; {self._advice()}"
            )

    def _fill(self, pieces: Iterable[TensorBox]) -> None:
        parts: dict[str, list[tuple[str, Any, Any, TensorBox]]] = {}
        for piece in pieces:
            stored = self._tensors.get(piece.key)
            if stored is None:
                raise CheckpointError(f"checkpoint {self.path} holds no {piece.key}")
            size = tuple(piece.into.shape)
            found = 0
            if len(size) != len(stored.size):
                raise CheckpointError(
                    f"checkpoint {self.path}: {piece.key} has the size {stored.size} there, and "
                    f"a part of the size {size} is needed"
                )
            for chunk in stored.chunks:
                shared = overlap(piece.first or (0,) * len(size), size, chunk)
                if shared is not None:
                    parts.setdefault(chunk.file, []).append((chunk.name, *shared, piece))
                    found += math.prod(place.stop - place.start for place in shared[0])
            if found != math.prod(size):
                raise CheckpointError(
                    f"checkpoint {self.path} holds {found} of {math.prod(size)} elements of "
                    f"{piece.key}, whose size is {stored.size} there"
                )
        try:
            for name, wanted in sorted(parts.items()):
                self._read_file(name, wanted)
        except (OSError, RuntimeError, ValueError, TypeError, IndexError, SafetensorError) as error:
            line = (str(error).splitlines() or [""])[0]
            raise CheckpointError(
                f"checkpoint {self.path} cannot be read: {type(error).__name__}: {line}"
            ) from error

    def _read_file(
        self, name: str, wanted: Iterable[tuple[str, list[slice], list[slice], TensorBox]]
    ) -> None:
        with safe_open(self.path / name, framework="pt") as file:
            for key, in_piece, in_chunk, piece in wanted:
                # A single number has no slices.
                part = file.get_slice(key)[tuple(in_chunk)] if in_chunk else file.get_tensor(key)
                piece.into.detach()[tuple(in_piece)].copy_(part)

    def _advice(self) -> str:
        """Returns a text that names the run's newest finite checkpoint. It reads one after the other."""
        folder = self.path.parent
        for name in reversed(
            [one.name for one in complete_checkpoints(folder) if one.name != self.path.name]
        ):
            with suppress(CheckpointError):
                if not not_finite(CheckpointReader(folder / name)._every_tensor()):
                    return f"write {name}, the newest that is finite, into {folder / LATEST} to go on from there"
        return "no other checkpoint of this run is finite: begin another run"

    def _every_tensor(self) -> Iterator[tuple[str, Tensor]]:
        """Yields all tensors, one at a time, finite or not."""
        for key, stored in self._tensors.items():
            into = torch.empty(stored.size, dtype=stored.dtype)
            self._fill([TensorBox(key, into)])
            yield key, into

    def tensors(self, keys: Iterable[str]) -> dict[str, Tensor]:
        found = {
            key: torch.empty(self._tensors[key].size, dtype=self._tensors[key].dtype)
            for key in keys
        }
        self.read(TensorBox(key, into) for key, into in found.items())
        return found

    def table(self, name: str) -> Tensor:
        """Returns all rows of an embedding table."""
        key = self._weight(name)
        return self.tensors([key])[key]

    def rows(self, name: str) -> int:
        """Returns the number of rows of an embedding table."""
        return self.sizes[self._weight(name)][0]

    def _weight(self, name: str) -> str:
        key = next(
            (
                k
                for k in self._tensors
                if k.startswith("model.") and k.endswith(f"{_TABLE}{name}.weight")
            ),
            None,
        )
        if key is None:
            raise CheckpointError(f"checkpoint {self.path} holds no table {name!r}")
        return key

    def tower(self) -> dict[str, Tensor]:
        """Returns the weights of the dense layers, by their names in the tower."""
        dense = [
            k
            for k in self._tensors
            if k.startswith("model.") and _TABLE not in k and ".tower." in k
        ]
        found = self.tensors(dense)
        return {key.rpartition("tower.")[2]: value for key, value in found.items()}


def mean_row_states(state: Tensor, rows: int) -> Tensor:
    """Returns one number for each row, from a table's row-wise state that may be cut by columns: [parts × rows].

    Each number is the mean of squares over the columns of its part. So their mean is that of the full row."""
    return state.view(-1, rows).mean(0)
