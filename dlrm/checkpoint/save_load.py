"""Saves and loads checkpoints: weights, optimiser states, and a `CheckpointMeta` with the loader's position.

All ranks save together. Training continues meanwhile if the host's memory holds a copy. Each checkpoint has its own
folder, which is complete once it holds meta.json. LATEST names the last saved one. Loading cuts the tables for the
present number of ranks and sharding. A checkpoint has no pickles.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sluice.dlrm.checkpoint import layout
from sluice.dlrm.checkpoint.checksums import damaged_files
from sluice.dlrm.checkpoint.disk import CheckpointDisk
from sluice.dlrm.checkpoint.finite import describe_tensors, not_finite
from sluice.dlrm.checkpoint.host_pieces import CudaHostLane, HostPieces
from sluice.dlrm.checkpoint.layout import Index, TensorEntry
from sluice.dlrm.checkpoint.meta import (
    BEST,
    LATEST,
    LAYOUT,
    META,
    CheckpointError,
    CheckpointMeta,
    NotFinite,
    complete_checkpoints,
    damage,
    raise_if_damaged,
    read_pointer,
)
from sluice.dlrm.checkpoint.partial_read import CheckpointReader, TensorBox, mean_row_states
from sluice.dlrm.checkpoint.save_memory import SaveMemory
from sluice.dlrm.model.local_parts import is_sharded, local_parts
from sluice.dlrm.ranks import Ranks
from sluice.ingest.machine import Machine

if TYPE_CHECKING:
    from sluice.dlrm.training.assemble import TrainingParts


class Checkpoints:
    """Writes a run's checkpoints into one folder. Keeps the last `keep` and the best. Every rank has one of these and
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
        lane: CudaHostLane | None = None,
        memory_free: Callable[[], int] | None = None,
    ) -> None:
        """`lane` is the way from the ranks' device. `memory_free` returns the free bytes of this host."""
        self.folder = folder
        self._parts = parts
        self._world = world
        self._keep = keep
        self._record = record
        self.files = files or CheckpointDisk()
        self._lane = lane or (CudaHostLane() if world.device.type == "cuda" else None)
        self._memory_free = memory_free or Machine().memory_free
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-checkpoint")
        self.path: Path | None = None
        """The folder of the last checkpoint that `save` started to write."""

    def memory(self) -> SaveMemory:
        """Returns what the next checkpoint needs of this host's memory. All ranks call it. Raises CheckpointError if
        there is too little on a host."""
        _, mine = self._own_entries(_state(self._parts))
        return self._memory_for(mine)

    def save(self, meta: CheckpointMeta) -> None:
        """Copies the state and returns. A thread writes the copy. LATEST changes when all ranks have written. If the
        host's memory has no room for a copy, the state itself is written in pieces before this returns."""
        self.wait()
        started_at = time.perf_counter()
        values, mine = self._own_entries(_state(self._parts))
        memory = self._memory_for(mine)
        name_or_error: tuple[str | None, str | None] = (None, None)
        if self._world.first:
            try:
                name_or_error = (self._make_folder(meta.step).name, None)
            except OSError as error:
                name_or_error = (None, _first_line(error))
        name, wrong = self._world.gather_objects(name_or_error)[0]
        if wrong is not None:
            raise _write_error(self.folder / f"step-{meta.step:09d}", wrong)
        self.path = path = self.folder / name
        host = HostPieces(memory.piece_bytes, self._lane)
        if memory.copies:
            mine = [replace(one, value=host.copy(one.value()).detach) for one in mine]
        held_s = time.perf_counter() - started_at

        def write() -> None:
            self._write(path, values, mine, meta, host)
            if self._world.first:
                seconds = time.perf_counter() - started_at
                self._record(
                    {
                        "kind": "checkpoint",
                        "step": meta.step,
                        "path": path.name,
                        "held_s": round(held_s if memory.copies else seconds, 3),
                        "seconds": round(seconds, 3),
                    }
                )

        self._pending = self._thread.submit(write)
        if not memory.copies:
            self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is complete. Raises CheckpointError if it could not be written. Earlier ones
        stay."""
        pending = self._pending
        self._pending = None
        try:
            if pending is not None:
                pending.result()
        except CheckpointError:
            raise
        except Exception as error:  # another rank has ended
            raise _write_error(self.path or self.folder, _first_line(error)) from error

    def close(self) -> None:
        """Ends the writing thread, after it has written its checkpoint."""
        self._thread.shutdown()

    def _make_folder(self, step: int) -> Path:
        """Makes an empty folder for a checkpoint of this step. Complete checkpoints of the same step stay, because BEST
        or LATEST may name one."""
        self.files.make(self.folder)
        taken = {one.name for one in complete_checkpoints(self.folder)}
        name = f"step-{step:09d}"
        number = 1
        while name in taken:
            number += 1
            name = f"step-{step:09d}-{number}"
        path = self.folder / name
        if path.exists():  # half-written by a run that was killed
            self.files.clear(path, META)
        self.files.make(path)
        return path

    def _own_entries(self, state: dict[str, Any]) -> tuple[dict[str, Any], list[TensorEntry]]:
        """Returns the values of a state that are not tensors, and the tensors that this rank writes."""
        leaves = [(key, value) for key, value, _ in _leaves(state)]
        unsharded = {
            key: value.nbytes
            for key, value in leaves
            if _is_tensor(value) and not is_sharded(value)
        }
        # Of the ranks that hold a tensor in full, one writes it. The bytes are spread evenly. All ranks decide alike.
        load: dict[int, int] = {}
        holders: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for rank, tensors in enumerate(self._world.gather_objects(unsharded)):
            load[rank] = 0
            sizes |= tensors
            for key in tensors:
                holders.setdefault(key, []).append(rank)
        owners = {}
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            owners[key] = min(holders[key], key=lambda rank: (load[rank], rank))
            load[owners[key]] += sizes[key]
        mine = [
            entry
            for key, value in leaves
            if _is_tensor(value) and owners.get(key, self._world.rank) == self._world.rank
            for entry in _entries(key, value)
        ]
        return {key: deepcopy(value) for key, value in leaves if not _is_tensor(value)}, mine

    def _memory_for(self, mine: Sequence[TensorEntry]) -> SaveMemory:
        """Returns what these entries and those of the other ranks of this host need."""
        own = self._world.host, self._memory_free(), sum(entry.bytes for entry in mine)
        hosts: dict[int, list[tuple[int, int]]] = {}
        for host, free, size in self._world.gather_objects(own):
            hosts.setdefault(host, []).append((free, size))
        # Every rank looks at every host, so that all ranks raise the same error.
        found = {
            host: SaveMemory(
                ranks=len(ranks),
                state_bytes=sum(size for _, size in ranks),
                free_bytes=min(free for free, _ in ranks),
            )
            for host, ranks in hosts.items()
        }
        return found[self._world.host]

    def _write(
        self,
        path: Path,
        values: dict[str, Any],
        mine: Sequence[TensorEntry],
        meta: CheckpointMeta,
        host: HostPieces,
    ) -> None:
        """Writes the checkpoint on all ranks together. An error on one rank stops all. Raises NotFinite on every rank,
        before any file is written, if a rank holds NaN or infinity."""
        found = not_finite((entry.key, entry.value()) for entry in mine)
        ranks = self._world.gather_objects(found, self._world.saving)
        if wrong := [text for texts in ranks for text in texts]:
            with suppress(OSError):
                if self._world.first:
                    self.files.clear(path, META)
            raise NotFinite(
                f"checkpoint {path} is not written: the model holds {describe_tensors(wrong)}; the one before it "
                "stays"
            )
        file = f"rank-{self._world.rank:05d}.safetensors"

        def write() -> dict[str, Any]:
            found = layout.write(self.files, path, file, mine, host)
            _verify_checksums(path, {file: found["sum"]})
            return found

        written = self._on_all_ranks(path, write)
        first = self._world.first
        self._on_all_ranks(
            path, lambda: self._write_meta(path, written, values, meta) if first else None
        )
        if first:
            self._remove_old()

    def _write_meta(
        self,
        path: Path,
        written: list[dict[str, Any]],
        values: dict[str, Any],
        meta: CheckpointMeta,
    ) -> None:
        described = Index.joined(written, values).to_json().encode()
        self.files.write(path / LAYOUT, [described])
        sums = {one["file"]: one["sum"] for one in written} | {LAYOUT: zlib.crc32(described)}
        _verify_checksums(path, {LAYOUT: sums[LAYOUT]})
        self.files.sync_folder(path)  # meta.json lists these files, so they are written before it
        meta.write(path, sums, self.files)

    def _on_all_ranks(self, path: Path, act: Callable[[], Any]) -> list[Any]:
        """Calls `act` on every rank and returns all results. Raises CheckpointError on every rank if one call
        failed."""
        found = None
        wrong = None
        try:
            found = act()
        except Exception as error:
            wrong = _first_line(error)
        answers = self._world.gather_objects((found, wrong), self._world.saving)
        failed = [text for _, text in answers if text is not None]
        if not failed:
            return [one for one, _ in answers]
        with suppress(OSError, CheckpointError):
            if self._world.first and path.name not in self._needed():
                self.files.clear(path, META)
        raise _write_error(path, failed[0])

    def _needed(self) -> set[str]:
        """Returns the checkpoints that LATEST and BEST name."""
        found = set()
        for name in (LATEST, BEST):
            if (self.folder / name).exists():
                found.add(read_pointer(self.folder / name)[0])
        return found

    def _remove_old(self) -> None:
        """Removes old and half-written checkpoints, after the last one is complete."""
        try:
            complete = [one.name for one in complete_checkpoints(self.folder)]
            needed = self._needed()
            old = [
                name
                for name in complete[: max(0, len(complete) - self._keep)]
                if name not in needed
            ]
            half_written = {path.name for path in self.folder.glob("step-*")} - {*complete}
            for name in (*old, *sorted(half_written)):
                self.files.clear(self.folder / name, META)
        except (OSError, CheckpointError) as error:
            self._record(
                {
                    "kind": "warning",
                    "text": f"old checkpoints could not be removed: {_first_line(error)}",
                }
            )


def load(path: Path, parts: TrainingParts, world: Ranks, *, optimisers: bool = True) -> None:
    """Fills the model and the optimisers from a checkpoint. Every rank calls it."""
    check(path, world)
    if optimisers:
        parts.dense.init_state()  # otherwise Adam makes its state at the first step
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
    """Raises CheckpointError on every rank if a file is damaged. Each rank reads a part of the files."""
    wrong = world.gather_objects(damage(path, rank=world.rank, ranks=world.ranks))
    raise_if_damaged(path, [text for texts in wrong for text in texts])


def _fill(stored: CheckpointReader, state: dict[str, Any]) -> None:
    """Fills a state with the saved tensors and the other saved values."""
    table_rows = {
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
        size = tuple(value.size())
        saved = stored.sizes.get(key, ())
        if size == saved or key not in stored.sizes:
            pieces += [TensorBox(key, entry.value(), entry.first) for entry in _entries(key, value)]
        elif len(saved) == len(size) == 1 and key in table_rows and not saved[0] % table_rows[key]:
            # The table was cut by columns in another way. Each part of the columns gets the state of the full row.
            states = mean_row_states(stored.tensors([key])[key], table_rows[key])
            for entry in _entries(key, value):
                first = entry.first[0] % len(states)
                entry.value().copy_(states[first : first + entry.size[0]])
        else:
            raise CheckpointError(
                f"checkpoint {stored.path}: {key} has the size {saved} there, and {size} is needed"
            )
    stored.read(pieces)


def _entries(key: str, value: Any) -> Iterator[TensorEntry]:
    """Yields the pieces of a tensor that this rank holds."""
    for first, part in local_parts(value):
        yield TensorEntry(
            key, part.dtype, tuple(value.size()), first, tuple(part.shape), part.detach
        )


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yields each value of a state: its key in a checkpoint, the value, and a function that replaces it."""
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


def _verify_checksums(folder: Path, sums: Mapping[str, int]) -> None:
    """Raises OSError if files on the disk do not match these checksums."""
    found = damaged_files(folder, sums, sums)
    if found:
        raise OSError("; ".join(found))


def _write_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} could not be written ({why}); the one before it is whole"
    )


def _first_line(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
