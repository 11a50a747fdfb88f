"""Reads any parts of a checkpoint's tensors, without a process group: `CheckpointReader`, `TensorBox`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice.dlrm.checkpoint.finite import in_words, not_finite
from sluice.dlrm.checkpoint.layout import Index, overlap
from sluice.dlrm.checkpoint.meta import LATEST, CheckpointError, NotFinite, whole

_TABLE = ".embedding_bags."


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a stored tensor, to be read into a tensor of the box's size."""

    key: str
    into: Tensor
    first: Sequence[int] | None = None
    """Where the box begins in each dimension; None: at 0."""


class CheckpointReader:
    """The tensors of one checkpoint folder. CheckpointError if it is damaged, or disappears while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = Index.read(path)
        self._tensors, self.values = index.tensors, index.values

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """The size of every tensor: weights under `model.`, the optimisers' states under `tables.` and `dense.`"""
        return {key: about.size for key, about in self._tensors.items()}

    def read(self, pieces: Iterable[TensorBox]) -> None:
        """Fills all the boxes, one file after the other. NotFinite if what they get holds NaN or infinity."""
        boxes = list(pieces)
        self._fill(boxes)
        if wrong := not_finite((box.key, box.into) for box in boxes):
            raise NotFinite(f"checkpoint {self.path} holds {in_words(wrong)}; {self._advice()}")

    def _fill(self, pieces: Iterable[TensorBox]) -> None:
        parts: dict[str, list[tuple[str, Any, Any, TensorBox]]] = {}
        for piece in pieces:
            about = self._tensors.get(piece.key)
            if about is None:
                raise CheckpointError(f"checkpoint {self.path} holds no {piece.key}")
            size, found = tuple(piece.into.shape), 0
            if len(size) != len(about.size):
                raise CheckpointError(
                    f"checkpoint {self.path}: {piece.key} has the size {about.size} there, and "
                    f"a part of the size {size} is needed"
                )
            for chunk in about.chunks:
                shared = overlap(piece.first or (0,) * len(size), size, chunk)
                if shared is not None:
                    parts.setdefault(chunk.file, []).append((chunk.name, *shared, piece))
                    found += math.prod(place.stop - place.start for place in shared[0])
            if found != math.prod(size):
                raise CheckpointError(
                    f"checkpoint {self.path} holds {found} of {math.prod(size)} elements of "
                    f"{piece.key}, whose size is {about.size} there"
                )
        with _as_ours(self.path):
            for name, wanted in sorted(parts.items()):
                self._take(name, wanted)

    def _take(
        self, name: str, wanted: Iterable[tuple[str, list[slice], list[slice], TensorBox]]
    ) -> None:
        with safe_open(self.path / name, framework="pt") as file:
            for key, in_piece, in_chunk, piece in wanted:
                if in_chunk:
                    piece.into.detach()[tuple(in_piece)].copy_(file.get_slice(key)[tuple(in_chunk)])
                else:
                    piece.into.detach().copy_(file.get_tensor(key))  # a single number

    def _advice(self) -> str:
        """Names the run's newest checkpoint that is finite. All that may be that are read."""
        folder = self.path.parent
        for name in reversed([one.name for one in whole(folder) if one.name != self.path.name]):
            with suppress(CheckpointError):
                if not not_finite(CheckpointReader(folder / name)._all()):
                    return f"write {name}, the newest that is finite, into {folder / LATEST} to go on from there"
        return "no other checkpoint of this run is finite: begin another run"

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, one at a time, whatever they hold."""
        for key, about in self._tensors.items():
            into = torch.empty(about.size, dtype=about.dtype)
            self._fill([TensorBox(key, into)])
            yield key, into

    def whole(self, keys: Iterable[str]) -> dict[str, Tensor]:
        found = {
            key: torch.empty(self._tensors[key].size, dtype=self._tensors[key].dtype)
            for key in keys
        }
        self.read(TensorBox(key, into) for key, into in found.items())
        return found

    def table(self, name: str) -> Tensor:
        """All rows of an embedding table."""
        key = self._weight(name)
        return self.whole([key])[key]

    def rows(self, name: str) -> int:
        """The number of rows of an embedding table."""
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
        """The weights of the dense side, by the tower's own names."""
        dense = [
            k
            for k in self._tensors
            if k.startswith("model.") and _TABLE not in k and ".tower." in k
        ]
        found = self.whole(dense)
        return {key.rpartition("tower.")[2]: value for key, value in found.items()}


@contextmanager
def _as_ours(path: Path) -> Iterator[None]:
    """Turns every failure of the library into a CheckpointError."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, TypeError, IndexError, SafetensorError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {type(error).__name__}: {line}"
        ) from error


def whole_rows(state: Tensor, rows: int) -> Tensor:
    """One number for each whole row, from a table's row-wise state that may be cut by columns: [runs × rows].

    Each number is the mean of squares over its run of columns, so their mean is the whole row's."""
    return state.view(-1, rows).mean(0)
