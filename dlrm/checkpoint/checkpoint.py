"""The format of a checkpoint: `Checkpoint` reads it, `write_pieces` and `layout_of` write it.

Tensors are in safetensors files, and layout.json says where each piece of a tensor is. Each rank writes its pieces into
its own file. A reader takes any box of a tensor from the pieces that the box touches. So any number of ranks can read a
checkpoint, under any sharding. No part is a pickle."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sluice.dlrm.checkpoint.disk import CheckpointDisk
from sluice.dlrm.checkpoint.meta import (
    LATEST,
    LAYOUT,
    CheckpointError,
    NotFinite,
    check,
    complete_checkpoints,
)
from sluice.dlrm.checkpoint.save_memory import HostPieces
from sluice.dlrm.model.local_parts import local_parts

if TYPE_CHECKING:
    from sluice.dlrm.ranks import Ranks
    from sluice.dlrm.training.assemble import TrainingParts

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
_TABLE = ".embedding_bags."
_MOST_NAMED = 3
"""The most tensors that a message names."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A box of a tensor in memory. It is written into a checkpoint, or filled from one."""

    key: str
    tensor: Tensor
    first: Sequence[int] | None = None
    """The first index of the box in each dimension. None: 0 in all."""
    whole: Sequence[int] = ()
    """The size of the tensor that this is a piece of. Only a writer needs it."""


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a stored tensor, and the file that holds it."""

    first: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    name: str
    """The name of the box in that file."""

    def __post_init__(self) -> None:
        if Path(self.file).name != self.file or self.file in ("", ".", ".."):
            raise ValueError(f"{self.file!r} is no name of a file in the checkpoint's own folder")
        if len(self.first) != len(self.size) or min((*self.first, *self.size), default=0) < 0:
            raise ValueError(f"a piece of {self.size} elements from {self.first} on is none")

    def overlap(
        self, first: Sequence[int], size: Sequence[int]
    ) -> tuple[list[slice], list[slice]] | None:
        """Returns the part that it shares with a box, as slices of the box and of the chunk. None: they share
        nothing."""
        in_box = []
        in_chunk = []
        for start, length, other, other_length in zip(
            first, size, self.first, self.size, strict=True
        ):
            low, high = max(start, other), min(start + length, other + other_length)
            if low >= high:
                return None
            in_box.append(slice(low - start, high - start))
            in_chunk.append(slice(low - other, high - other))
        return in_box, in_chunk


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, and the chunks in which it is stored."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if len(chunk.size) != len(self.size) or any(
                a + b > c for a, b, c in zip(chunk.first, chunk.size, self.size, strict=True)
            ):
                raise ValueError(
                    f"a piece of {chunk.size} elements from {chunk.first} on is none of a tensor of {self.size}"
                )


class Checkpoint:
    """One complete checkpoint. Raises CheckpointError if it is damaged, or removed while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _layout(self) -> tuple[Mapping[str, StoredTensor], Mapping[str, Any]]:
        """The contents of layout.json: the tensors, and all values that are not tensors."""
        try:
            layout = json.loads((self.path / LAYOUT).read_text())
            if layout["format"] != FORMAT:
                raise ValueError(
                    f"its format is {layout['format']!r}, and this program reads {FORMAT}"
                )
            tensors = {
                key: StoredTensor(
                    TYPES[stored["dtype"]],
                    tuple(stored["size"]),
                    tuple(TensorChunk(tuple(a), tuple(b), c, d) for a, b, c, d in stored["chunks"]),
                )
                for key, stored in layout["tensors"].items()
            }
            return tensors, dict(layout["values"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"checkpoint {self.path}: {LAYOUT} cannot be read: {type(error).__name__}: {error}"
            ) from None

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """The size of every tensor. Weights have keys under `model.`, optimiser states under `tables.` and `dense.`"""
        return {key: stored.size for key, stored in self._layout[0].items()}

    @property
    def values(self) -> Mapping[str, Any]:
        """What is saved besides tensors."""
        return self._layout[1]

    def load(self, parts: TrainingParts, world: Ranks, *, optimisers: bool = True) -> None:
        """Fills the model and the optimisers. Every rank calls it, and gets what it holds under its own sharding."""
        check(self.path, world)
        state = first_state(parts) if optimisers else {"model": parts.model.state_dict()}
        wrong = None
        try:
            self._fill_state(state)
        except CheckpointError as error:
            wrong = str(error)
        for text in world.gather_objects(wrong):
            if text is not None:
                raise CheckpointError(text)
        put_state(parts, state)

    def read(self, pieces: Iterable[TensorPart]) -> None:
        """Fills all pieces, one file after the other. Raises NotFinite if the values hold NaN or infinity."""
        pieces = list(pieces)
        self._fill(pieces)
        if wrong := not_finite(pieces):
            raise NotFinite(
                f"checkpoint {self.path} holds {describe_tensors(wrong)}; {self._advice()}"
            )

    def tensors(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Returns whole tensors."""
        pieces = [self._empty(key) for key in keys]
        self.read(pieces)
        return {piece.key: piece.tensor for piece in pieces}

    def fill_row_states(self, key: str, value: Any, rows: int, new_rows: int) -> None:
        """Fills this rank's parts of the row-wise state of a table of `new_rows`, whose first `rows` are stored. Either
        may be cut by columns."""
        states = mean_row_states(self.tensors([key])[key], rows)
        for first, part in local_parts(value):
            values = states[first[0] % new_rows :][: len(part)]
            part[: len(values)] = values

    def table(self, name: str) -> Tensor:
        """Returns all rows of an embedding table."""
        key = self._weight(name)
        return self.tensors([key])[key]

    def rows(self, name: str) -> int:
        """Returns the number of rows of an embedding table."""
        return self.sizes[self._weight(name)][0]

    def tower(self) -> dict[str, Tensor]:
        """Returns the weights of the dense layers, by their names in the tower."""
        dense = [
            key
            for key in self.sizes
            if key.startswith("model.") and _TABLE not in key and ".tower." in key
        ]
        return {key.rpartition("tower.")[2]: value for key, value in self.tensors(dense).items()}

    def _weight(self, name: str) -> str:
        for key in self.sizes:
            if key.startswith("model.") and key.endswith(f"{_TABLE}{name}.weight"):
                return key
        raise CheckpointError(f"checkpoint {self.path} holds no table {name!r}")

    def _fill_state(self, state: dict[str, Any]) -> None:
        """Fills a state with the saved tensors and the other saved values."""
        values, sizes = self.values, self.sizes
        table_rows = {
            f"tables.state.{table}.{key}": state["model"][table].size(0)
            for table, states in state.get("tables", {}).get("state", {}).items()
            for key in states
        }
        pieces: list[TensorPart] = []
        for key, value, put in leaves(state):
            if not isinstance(value, Tensor):
                if key not in values:
                    raise CheckpointError(f"checkpoint {self.path} holds no {key}")
                put(tuple(values[key]) if isinstance(value, tuple) else values[key])
                continue
            size = tuple(value.size())
            saved = sizes.get(key, size)
            if size == saved:
                pieces += pieces_of(key, value)
            elif (
                len(saved) == len(size) == 1
                and key in table_rows
                and not saved[0] % table_rows[key]
            ):
                # The table was cut by columns in another way. Each part of the columns gets the state of the full row.
                self.fill_row_states(key, value, table_rows[key], table_rows[key])
            else:
                raise CheckpointError(
                    f"checkpoint {self.path}: {key} has the size {saved} there, and {size} is needed"
                )
        self.read(pieces)

    def _fill(self, pieces: Iterable[TensorPart]) -> None:
        parts: dict[str, list[tuple[str, Any, Any, TensorPart]]] = {}
        for piece in pieces:
            stored = self._layout[0].get(piece.key)
            if stored is None:
                raise CheckpointError(f"checkpoint {self.path} holds no {piece.key}")
            size = tuple(piece.tensor.shape)
            filled = 0
            if len(size) != len(stored.size):
                raise CheckpointError(
                    f"checkpoint {self.path}: {piece.key} has the size {stored.size} there, and "
                    f"a part of the size {size} is needed"
                )
            for chunk in stored.chunks:
                shared = chunk.overlap(piece.first or (0,) * len(size), size)
                if shared is not None:
                    parts.setdefault(chunk.file, []).append((chunk.name, *shared, piece))
                    filled += math.prod(place.stop - place.start for place in shared[0])
            if filled != math.prod(size):
                raise CheckpointError(
                    f"checkpoint {self.path} holds {filled} of {math.prod(size)} elements of "
                    f"{piece.key}, whose size is {stored.size} there"
                )
        try:
            for name, wanted in sorted(parts.items()):
                with safe_open(self.path / name, framework="pt") as file:
                    for key, in_piece, in_chunk, piece in wanted:
                        # A single number has no slices.
                        part = (
                            file.get_slice(key)[tuple(in_chunk)]
                            if in_chunk
                            else file.get_tensor(key)
                        )
                        piece.tensor.detach()[tuple(in_piece)].copy_(part)
        except (OSError, RuntimeError, ValueError, TypeError, IndexError, SafetensorError) as error:
            line = (str(error).splitlines() or [""])[0]
            raise CheckpointError(
                f"checkpoint {self.path} cannot be read: {type(error).__name__}: {line}"
            ) from error

    def _empty(self, key: str) -> TensorPart:
        stored = self._layout[0][key]
        return TensorPart(key, torch.empty(stored.size, dtype=stored.dtype))

    def _advice(self) -> str:
        """Returns a text that names the run's newest finite checkpoint. It reads one after the other."""
        folder = self.path.parent
        for name in reversed(complete_checkpoints(folder)):
            with suppress(CheckpointError):
                other = Checkpoint(folder / name)
                if name != self.path.name and not not_finite(map(other._whole, other.sizes)):
                    return f"write {name}, the newest that is finite, into {folder / LATEST} to go on from there"
        return "no other checkpoint of this run is finite: begin another run"

    def _whole(self, key: str) -> TensorPart:
        """Returns a whole tensor, finite or not."""
        piece = self._empty(key)
        self._fill([piece])
        return piece


def mean_row_states(state: Tensor, rows: int) -> Tensor:
    """Returns one number for each row, from a table's row-wise state that may be cut by columns: [parts × rows].

    Each number is the mean of squares over the columns of its part. So their mean is that of the full row."""
    return state.view(-1, rows).mean(0)


def state_of(parts: TrainingParts) -> dict[str, Any]:
    """Returns all weights and states of the optimisers, as they are saved."""
    return {
        "model": parts.model.state_dict(),
        "tables": parts.table_states.state_dict(),
        "dense": parts.dense.state_dict(),
    }


def first_state(parts: TrainingParts) -> dict[str, Any]:
    """Returns the state of parts that have not trained yet, to be filled for `put_state`."""
    parts.dense.init_state()  # otherwise Adam makes its state at the first step
    parts.dense.zero_grad()
    return state_of(parts)


def put_state(parts: TrainingParts, state: Mapping[str, Any]) -> None:
    """Gives a filled state to the parts: of the model, and of the optimisers if it has theirs."""
    parts.model.load_state_dict(state["model"])
    if "tables" in state:
        parts.table_states.load_state_dict(state["tables"])
        parts.dense.load_state_dict(state["dense"])


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yields each value of a state: its key in a checkpoint, the value, and a function that replaces it."""
    for key, value in list(values.items()) if isinstance(values, dict) else enumerate(values):
        if isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(element, Tensor) for element in value)
        ):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, partial(values.__setitem__, key)


def pieces_of(key: str, value: Any) -> Iterator[TensorPart]:
    """Yields the pieces of a tensor that this rank holds."""
    for first, part in local_parts(value):
        yield TensorPart(key, part, first, tuple(value.size()))


def not_finite(pieces: Iterable[TensorPart]) -> list[str]:
    """Returns a text for each tensor with NaN or infinity, with their number."""
    described = []
    for piece in pieces:
        values = piece.tensor
        if not (values.is_floating_point() and values.numel()):
            continue
        # `aminmax` needs no memory, and returns NaN if there is one.
        if not torch.isfinite(torch.stack(torch.aminmax(values.detach()))).all():
            wrong = int((~torch.isfinite(values)).sum())
            described.append(f"{piece.key} ({wrong:,} of {values.numel():,})")
    return described


def describe_tensors(texts: Sequence[str]) -> str:
    """Joins the first of these texts, with the number of the others."""
    more = f" and {len(texts) - _MOST_NAMED} more tensors" if len(texts) > _MOST_NAMED else ""
    return f"numbers that are not finite: {', '.join(texts[:_MOST_NAMED])}{more}"


def write_pieces(
    files: CheckpointDisk,
    folder: Path,
    file: str,
    pieces: Iterable[TensorPart],
    host: HostPieces | None = None,
) -> dict[str, Any]:
    """Writes these pieces as a safetensors file. Returns the `file`, its checksum `sum` and the `pieces` in it, for the
    layout. `host` brings tensors of a device to the host."""
    host = host or HostPieces()
    header: dict[str, Any] = {}
    described = []
    tensors = []
    at = checksum = 0
    for number, piece in enumerate(pieces):
        name, kind, size = f"{number} {piece.key}", NAMES[piece.tensor.dtype], piece.tensor.shape
        end = at + piece.tensor.nbytes
        header[name] = {"dtype": kind, "shape": size, "data_offsets": [at, end]}
        described.append([piece.key, kind, piece.whole, piece.first, size, name])
        tensors.append(piece.tensor)
        at = end

    def parts() -> Iterator[Any]:
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for tensor in tensors:
            for part in host.pieces(tensor):
                yield part.numpy().data

    def summed() -> Iterator[Any]:
        nonlocal checksum
        for part in parts():
            checksum = zlib.crc32(part, checksum)
            yield part

    files.write(folder / file, summed())
    return {"file": file, "sum": checksum, "pieces": described}


def layout_of(ranks: Iterable[Mapping[str, Any]], values: Mapping[str, Any]) -> bytes:
    """Returns layout.json, from what `write_pieces` returned on each rank and the values that are not tensors. Raises
    ValueError if a part of a tensor is missing."""
    tensors: dict[str, Any] = {}
    for rank in ranks:
        for key, kind, whole, first, size, name in rank["pieces"]:
            stored = tensors.setdefault(key, {"dtype": kind, "size": whole, "chunks": []})
            stored["chunks"].append([first, size, rank["file"], name])
    for key, stored in tensors.items():
        whole = math.prod(stored["size"])
        elements = sum(math.prod(size) for _, size, _, _ in stored["chunks"])
        if elements != whole:
            raise ValueError(f"{key} has {whole} elements, and the ranks hold {elements}")
    return json.dumps({"format": FORMAT, "tensors": tensors, "values": values}).encode()
