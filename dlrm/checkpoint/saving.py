"""Saves a run's checkpoints: weights, optimiser states, and a `CheckpointMeta` with the loader's position.

All ranks save together. Training continues meanwhile if the host's memory holds a copy. Each checkpoint has its own
folder, which is complete once it holds meta.json. LATEST names the last saved one.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sluice.dlrm.checkpoint.checkpoint import (
    TensorPart,
    describe_tensors,
    layout_of,
    leaves,
    not_finite,
    pieces_of,
    state_of,
    write_pieces,
)
from sluice.dlrm.checkpoint.disk import CheckpointDisk, damaged_files
from sluice.dlrm.checkpoint.meta import (
    BEST,
    LATEST,
    LAYOUT,
    META,
    CheckpointError,
    CheckpointMeta,
    NotFinite,
    complete_checkpoints,
    read_pointer,
)
from sluice.dlrm.checkpoint.save_memory import CudaHostLane, HostPieces, SaveMemory
from sluice.dlrm.model.local_parts import is_sharded
from sluice.dlrm.ranks import Ranks
from sluice.ingest.machine import Machine

if TYPE_CHECKING:
    from sluice.dlrm.training.assemble import TrainingParts


@dataclass(eq=False)
class Checkpoints:
    """Writes a run's checkpoints into one folder. Keeps the last `keep` and the best. Every rank has one of these and
    calls the same methods."""

    folder: Path
    parts: TrainingParts
    world: Ranks
    keep: int
    record: Callable[[dict[str, Any]], None] = lambda _: None
    """Takes events."""
    files: CheckpointDisk = field(default_factory=CheckpointDisk)
    lane: CudaHostLane | None = None
    """The way from the ranks' device. None: their tensors are on the host, or the device is a GPU."""
    memory_free: Callable[[], int] = field(default_factory=lambda: Machine().memory_free)
    """Returns this host's free bytes."""

    def __post_init__(self) -> None:
        if self.lane is None and self.world.device.type == "cuda":
            self.lane = CudaHostLane()
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sluice-checkpoint")
        self.path: Path | None = None
        """The folder of the last checkpoint that `save` started to write."""

    def memory(self) -> SaveMemory:
        """Returns what the next checkpoint needs of this host's memory. All ranks call it. Raises CheckpointError if
        there is too little on a host."""
        _, mine = self._own_pieces(state_of(self.parts))
        return self._memory_for(mine)

    def save(self, meta: CheckpointMeta) -> None:
        """Copies the state and returns. A thread writes the copy. LATEST changes when all ranks have written. If the
        host's memory has no room for a copy, the state itself is written in pieces before this returns."""
        self.wait()
        started_at = time.perf_counter()
        values, mine = self._own_pieces(state_of(self.parts))
        memory = self._memory_for(mine)
        name_or_error: tuple[str | None, str | None] = (None, None)
        if self.world.first:
            try:
                name_or_error = (make_folder(self.folder, meta.step, self.files).name, None)
            except OSError as error:
                name_or_error = (None, _first_line(error))
        name, wrong = self.world.gather_objects(name_or_error)[0]
        if wrong is not None:
            raise _write_error(self.folder / f"step-{meta.step:09d}", wrong)
        self.path = path = self.folder / name
        host = HostPieces(memory.piece_bytes, self.lane)
        if memory.copies:
            mine = [replace(piece, tensor=host.copy(piece.tensor)) for piece in mine]
        held_s = time.perf_counter() - started_at

        def write() -> None:
            self._write(path, values, mine, meta, host)
            if self.world.first:
                seconds = time.perf_counter() - started_at
                self.record(
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

    def _own_pieces(self, state: dict[str, Any]) -> tuple[dict[str, Any], list[TensorPart]]:
        """Returns the values of a state that are not tensors, and the tensors that this rank writes."""
        values = {key: value for key, value, _ in leaves(state)}
        tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        unsharded = {key: value.nbytes for key, value in tensors.items() if not is_sharded(value)}
        # Of the ranks that hold a tensor in full, one writes it. The bytes are spread evenly. All ranks decide alike.
        load: dict[int, int] = {}
        holders: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for rank, held in enumerate(self.world.gather_objects(unsharded)):
            load[rank] = 0
            sizes |= held
            for key in held:
                holders.setdefault(key, []).append(rank)
        owners = {}
        for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
            owners[key] = min(holders[key], key=lambda rank: (load[rank], rank))
            load[owners[key]] += sizes[key]
        mine = [
            piece
            for key, value in tensors.items()
            if owners.get(key, self.world.rank) == self.world.rank
            for piece in pieces_of(key, value)
        ]
        return {k: deepcopy(v) for k, v in values.items() if k not in tensors}, mine

    def _memory_for(self, mine: Sequence[TensorPart]) -> SaveMemory:
        """Returns what these pieces and those of the other ranks of this host need."""
        own = self.world.host, self.memory_free(), sum(piece.tensor.nbytes for piece in mine)
        hosts: dict[int, list[tuple[int, int]]] = {}
        for host, free, size in self.world.gather_objects(own):
            hosts.setdefault(host, []).append((free, size))
        # Every rank looks at every host, so that all ranks raise the same error.
        by_host = {
            host: SaveMemory(
                ranks=len(ranks),
                state_bytes=sum(size for _, size in ranks),
                free_bytes=min(free for free, _ in ranks),
            )
            for host, ranks in hosts.items()
        }
        return by_host[self.world.host]

    def _write(
        self,
        path: Path,
        values: dict[str, Any],
        mine: Sequence[TensorPart],
        meta: CheckpointMeta,
        host: HostPieces,
    ) -> None:
        """Writes the checkpoint on all ranks together. An error on one rank stops all. Raises NotFinite on every rank,
        before any file is written, if a rank holds NaN or infinity."""
        ranks = self.world.gather_objects(not_finite(mine), self.world.saving)
        if wrong := [text for texts in ranks for text in texts]:
            with suppress(OSError):
                if self.world.first:
                    self.files.clear(path, META)
            raise NotFinite(
                f"checkpoint {path} is not written: the model holds {describe_tensors(wrong)}; the one before it stays"
            )
        file = f"rank-{self.world.rank:05d}.safetensors"

        def write() -> dict[str, Any]:
            entry = write_pieces(self.files, path, file, mine, host)
            _verify_checksums(path, {file: entry["sum"]})
            return entry

        written = self._on_all_ranks(path, write)
        first = self.world.first

        def complete() -> None:
            meta.write(path, put_layout(path, written, values, self.files), self.files)

        self._on_all_ranks(path, complete if first else lambda: None)
        if first:
            self._remove_old()

    def _on_all_ranks(self, path: Path, act: Callable[[], Any]) -> list[Any]:
        """Calls `act` on every rank and returns all results. Raises CheckpointError on every rank if one call
        failed."""
        result = None
        wrong = None
        try:
            result = act()
        except Exception as error:
            wrong = _first_line(error)
        answers = self.world.gather_objects((result, wrong), self.world.saving)
        failed = [text for _, text in answers if text is not None]
        if not failed:
            return [answer for answer, _ in answers]
        with suppress(OSError, CheckpointError):
            if self.world.first and path.name not in self._needed():
                self.files.clear(path, META)
        raise _write_error(path, failed[0])

    def _needed(self) -> set[str]:
        """Returns the checkpoints that LATEST and BEST name."""
        return {
            read_pointer(self.folder / name)[0]
            for name in (LATEST, BEST)
            if (self.folder / name).exists()
        }

    def _remove_old(self) -> None:
        """Removes old and half-written checkpoints, after the last one is complete."""
        try:
            complete = list(complete_checkpoints(self.folder))
            old = {*complete[: max(0, len(complete) - self.keep)]} - self._needed()
            half_written = {path.name for path in self.folder.glob("step-*")} - {*complete}
            for name in sorted(old | half_written):
                self.files.clear(self.folder / name, META)
        except (OSError, CheckpointError) as error:
            self.record(
                {
                    "kind": "warning",
                    "text": f"old checkpoints could not be removed: {_first_line(error)}",
                }
            )


def make_folder(folder: Path, step: int, files: CheckpointDisk) -> Path:
    """Makes an empty folder for a checkpoint of this step. Complete checkpoints of the same step stay, because BEST or
    LATEST may name one."""
    files.make(folder)
    taken = complete_checkpoints(folder)
    name = f"step-{step:09d}"
    number = 1
    while name in taken:
        number += 1
        name = f"step-{step:09d}-{number}"
    path = folder / name
    if path.exists():  # half-written by a run that was killed
        files.clear(path, META)
    files.make(path)
    return path


def put_layout(
    path: Path,
    written: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    files: CheckpointDisk,
) -> dict[str, int]:
    """Writes layout.json, from what `write_pieces` returned on each rank. Returns the checksum of each file. meta.json,
    which lists them, may be written then."""
    described = layout_of(written, values)
    files.write(path / LAYOUT, [described])
    sums = {entry["file"]: entry["sum"] for entry in written} | {LAYOUT: zlib.crc32(described)}
    _verify_checksums(path, {LAYOUT: sums[LAYOUT]})
    files.sync_folder(path)
    return sums


def _verify_checksums(folder: Path, sums: Mapping[str, int]) -> None:
    """Raises OSError if files on the disk do not match these checksums."""
    damages = damaged_files(folder, sums, sums)
    if damages:
        raise OSError("; ".join(damages))


def _write_error(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} could not be written ({why}); the one before it is whole"
    )


def _first_line(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
