"""Saves and loads checkpoints: weights, both optimisers' states, and a `CheckpointMeta` with the loader's position. All
ranks save together, while training goes on.

Each lies in a folder of its own, complete once it holds meta.json; LATEST leads to the one that was saved last. Saved
tables are cut anew for another number of ranks or another sharding. Nothing in a checkpoint is a pickle.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from sluice.dlrm.checkpoint import layout
from sluice.dlrm.checkpoint.checksums import damaged
from sluice.dlrm.checkpoint.disk import CheckpointDisk
from sluice.dlrm.checkpoint.finite import in_words, not_finite
from sluice.dlrm.checkpoint.layout import Index, TensorEntry
from sluice.dlrm.checkpoint.meta import (
    BEST,
    LATEST,
    LAYOUT,
    META,
    CheckpointError,
    CheckpointMeta,
    NotFinite,
    damage,
    lead,
    refuse,
    superfluous,
    whole,
)
from sluice.dlrm.checkpoint.partial_read import CheckpointReader, TensorBox, whole_rows
from sluice.dlrm.model.local_parts import is_sharded, local_parts
from sluice.dlrm.ranks import Ranks

if TYPE_CHECKING:
    from sluice.dlrm.training.assemble import TrainingParts


class Checkpoints:
    """A run's checkpoints, in one folder: the last `keep` of them stay, and the best. Every rank has such an object and
    calls the same methods."""

    def __init__(
        self,
        folder: Path,
        parts: TrainingParts,
        world: Ranks,
        *,
        keep: int,
        record: Callable[[dict[str, Any]], None],
        files: CheckpointDisk | None = None,
    ) -> None:
        self.folder = folder
        self._parts = parts
        self._world = world
        self._keep = keep
        self._record = record
        self.files = files or CheckpointDisk()
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-checkpoint")
        self.path: Path | None = None
        """The folder of the last checkpoint that `save` began."""

    def save(self, meta: CheckpointMeta) -> None:
        """Copies the state and returns; the copy is written meanwhile. LATEST moves when all ranks have written."""
        self.wait()
        began = time.perf_counter()
        made: tuple[str | None, str | None] = (None, None)
        if self._world.first:
            try:
                made = (self._place(meta.step).name, None)
            except OSError as error:
                made = (None, _words(error))
        name, wrong = self._world.gather_objects(made)[0]
        if wrong is not None:
            raise _unwritten(self.folder / f"step-{meta.step:09d}", wrong)
        self.path = path = self.folder / name
        state = _copied(_state(self._parts), self._world)
        held = time.perf_counter() - began

        def write() -> None:
            self._write(path, state, meta)
            if self._world.first:
                self._record(
                    {
                        "kind": "checkpoint",
                        "step": meta.step,
                        "path": path.name,
                        "held_s": round(held, 3),
                        "seconds": round(time.perf_counter() - began, 3),
                    }
                )

        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Waits until the last checkpoint is complete; CheckpointError if it could not be written. Earlier ones
        stay."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except CheckpointError:
            raise
        except Exception as error:  # another rank is gone
            raise _unwritten(self.path or self.folder, _words(error)) from error

    def close(self) -> None:
        """Ends the writing thread, once it has written what it still has."""
        self._thread.shutdown()

    def _place(self, step: int) -> Path:
        """An empty folder for a checkpoint of this step. Complete ones stay: another one of the same step may be the
        best, or the one that LATEST leads to."""
        self.files.make(self.folder)
        taken = {one.name for one in whole(self.folder)}
        name, number = f"step-{step:09d}", 1
        while name in taken:
            number += 1
            name = f"step-{step:09d}-{number}"
        path = self.folder / name
        if path.exists():  # a half-written one of a run that was killed here
            self.files.clear(path, META)
        self.files.make(path)
        return path

    def _write(self, path: Path, state: dict[str, Any], meta: CheckpointMeta) -> None:
        """Writes the checkpoint in the same way on all ranks: what stops one of them stops all."""
        world = self._world
        held = [(key, value) for key, value, _ in _leaves(state)]
        whole_ones = {
            key: value.nbytes for key, value in held if _is_tensor(value) and not is_sharded(value)
        }
        owners = owners_of(world.gather_objects(whole_ones, world.saving))
        mine = [
            entry
            for key, value in held
            if _is_tensor(value) and owners.get(key, world.rank) == world.rank
            for entry in _entries(key, value)
        ]
        self._refuse_what_is_not_finite(path, mine)
        file = f"rank-{world.rank:05d}.safetensors"

        def write() -> dict[str, Any]:
            found = layout.write(self.files, path, file, mine)
            _compare(path, {file: found["sum"]})
            return found

        written = self._together(path, write)
        values = {key: value for key, value in held if not _is_tensor(value)}
        self._together(
            path, lambda: self._complete(path, written, values, meta) if world.first else None
        )
        if world.first:
            self._forget()

    def _refuse_what_is_not_finite(self, path: Path, mine: list[TensorEntry]) -> None:
        """Raises NotFinite on every rank, before any file is written, if a rank holds numbers that are not finite."""
        found = not_finite((entry.key, entry.value()) for entry in mine)
        ranks = self._world.gather_objects(found, self._world.saving)
        if wrong := [text for texts in ranks for text in texts]:
            with suppress(OSError):
                if self._world.first:
                    self.files.clear(path, META)
            raise NotFinite(
                f"checkpoint {path} is not written: the model holds {in_words(wrong)}; the one before it "
                "stays"
            )

    def _complete(
        self,
        path: Path,
        written: list[dict[str, Any]],
        values: dict[str, Any],
        meta: CheckpointMeta,
    ) -> None:
        described = Index.joined(written, values).to_json().encode()
        self.files.write(path / LAYOUT, [described])
        sums = {one["file"]: one["sum"] for one in written} | {LAYOUT: zlib.crc32(described)}
        _compare(path, {LAYOUT: sums[LAYOUT]})
        self.files.settle(path)  # whatever meta.json speaks for is there before it
        meta.write(path, sums, self.files)

    def _together(self, path: Path, act: Callable[[], Any]) -> list[Any]:
        """The results of every rank's `act`, on every rank; CheckpointError on every rank if one of them failed."""
        found, wrong = None, None
        try:
            found = act()
        except Exception as error:
            wrong = _words(error)
        answers = self._world.gather_objects((found, wrong), self._world.saving)
        failed = [text for _, text in answers if text is not None]
        if not failed:
            return [one for one, _ in answers]
        with suppress(OSError, CheckpointError):
            if self._world.first and path.name not in self._needed():
                self.files.clear(path, META)
        raise _unwritten(path, failed[0])

    def _needed(self) -> set[str]:
        """The checkpoints that LATEST and BEST lead to."""
        found = set()
        for name in (LATEST, BEST):
            if (self.folder / name).exists():
                found.add(lead(self.folder / name)[0])
        return found

    def _forget(self) -> None:
        """Removes superfluous checkpoints, and what others left half-written, once the last one is complete."""
        try:
            complete = whole(self.folder)
            gone = superfluous(complete, self._keep, self._needed())
            half = {p.name for p in self.folder.glob("step-*")} - {one.name for one in complete}
            for name in (*gone, *sorted(half)):
                self.files.clear(self.folder / name, META)
        except (OSError, CheckpointError) as error:
            self._record(
                {
                    "kind": "warning",
                    "text": f"old checkpoints could not be removed: {_words(error)}",
                }
            )


def owners_of(ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Which rank writes each tensor that several ranks hold as a whole. `ranks` has each rank's tensors and their
    bytes. The work is spread as evenly as possible, and the answer is the same on every rank."""
    load: dict[int, int] = {}
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, held in enumerate(ranks):
        load[rank] = 0
        sizes |= held
        for key in held:
            holders.setdefault(key, []).append(rank)
    found = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        found[key] = min(holders[key], key=lambda rank: (load[rank], rank))
        load[found[key]] += sizes[key]
    return found


def load(path: Path, parts: TrainingParts, world: Ranks, *, optimisers: bool = True) -> None:
    """Fills the model, and both optimisers, from a checkpoint; called by every rank."""
    check(path, world)
    if optimisers:
        parts.dense.init_state()  # Adam makes its state at the first step only; the values come from the file
        parts.dense.zero_grad()
    state = _state(parts) if optimisers else {"model": parts.model.state_dict()}
    wrong = None
    try:
        _fill(CheckpointReader(path), state)
    except CheckpointError as error:
        wrong = str(error)
    for text in world.gather_objects(wrong):
        if text is not None:
            raise CheckpointError(text)
    parts.model.load_state_dict(state["model"])
    if optimisers:
        parts.table_states.load_state_dict(state["tables"])
        parts.dense.load_state_dict(state["dense"])


def check(path: Path, world: Ranks) -> None:
    """Raises CheckpointError on every rank if a file is not as it was written; each rank reads its part of them."""
    wrong = world.gather_objects(damage(path, rank=world.rank, ranks=world.ranks))
    refuse(path, [text for texts in wrong for text in texts])


def _fill(stored: CheckpointReader, state: dict[str, Any]) -> None:
    """Fills a state's tensors with the saved ones; its other values become the saved ones."""
    rows = {
        f"tables.state.{table}.{key}": state["model"][table].size(0)
        for table, values in state.get("tables", {}).get("state", {}).items()
        for key in values
    }
    pieces = []
    for key, value, put in _leaves(state):
        if not _is_tensor(value):
            if key not in stored.values:
                raise CheckpointError(f"checkpoint {stored.path} holds no {key}")
            put(tuple(stored.values[key]) if isinstance(value, tuple) else stored.values[key])
            continue
        size, saved = tuple(value.size()), stored.sizes.get(key, ())
        if size == saved or key not in stored.sizes:
            pieces += [TensorBox(key, entry.value(), entry.first) for entry in _entries(key, value)]
        elif len(saved) == len(size) == 1 and key in rows and not saved[0] % rows[key]:
            _recut(value, whole_rows(stored.whole([key])[key], rows[key]))
        else:
            raise CheckpointError(
                f"checkpoint {stored.path}: {key} has the size {saved} there, and {size} is needed"
            )
    stored.read(pieces)


def _recut(now: Any, rows: torch.Tensor) -> None:
    """Fills the row-wise state of a table that was cut into other runs of columns than now: each new run begins with
    the state of the whole row."""
    for entry in _entries("", now):
        first = entry.first[0] % len(rows)
        entry.value().copy_(rows[first : first + entry.size[0]])


def _entries(key: str, value: Any) -> Iterator[TensorEntry]:
    """The pieces of a tensor that this rank holds."""
    for first, part in local_parts(value):
        yield TensorEntry(
            key, part.dtype, tuple(value.size()), first, tuple(part.shape), part.detach
        )


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Each value of a state: the name that a checkpoint has for it, the value, and a function that replaces it."""
    for key, value in list(values.items()) if isinstance(values, dict) else enumerate(values):
        if isinstance(value, dict) or (isinstance(value, list) and any(map(_is_tensor, value))):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value, partial(values.__setitem__, key)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _state(parts: TrainingParts) -> dict[str, Any]:
    return {
        "model": parts.model.state_dict(),
        "tables": parts.table_states.state_dict(),
        "dense": parts.dense.state_dict(),
    }


def _copied(value: Any, world: Ranks) -> Any:
    """A copy of a state's tensors in memory that training does not touch: on the CPU."""
    if isinstance(value, dict):
        return {key: _copied(inner, world) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(inner, world) for inner in value)
    if world.device.type == "cpu":
        return value.clone() if isinstance(value, (torch.Tensor, ShardedTensor)) else value
    if isinstance(value, ShardedTensor):
        return value.cpu(process_group=world.saving)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _compare(folder: Path, sums: Mapping[str, int]) -> None:
    """Compares the checksums with what the disk holds now."""
    found = damaged(folder, sums, sums)
    if found:
        raise OSError("; ".join(found))


def _unwritten(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} could not be written ({why}); the one before it is whole"
    )


def _words(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
