"""What may be changed while a pipeline runs, and how far: `Knobs` and their `Limits`.

Both are frozen and reject nonsense when they are made, so nothing downstream checks them again. Standard library only:
the agent imports this file and little else of the loader.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from sluice.common.errors import UsageError
from sluice.common.suggest import nearest as nearest  # noqa: PLC0414  for those who know the knobs

BACKENDS = ("thread", "process")
"""Where transforms may run, on this host."""
REMOTE = "remote"
"""Where reading may run besides: in workers that other processes or other hosts have (`ingest/remote`)."""
REQUESTS_A_CORE = 2
"""How many requests keep such a worker's core busy: one is made while another is on its way."""
PLACES = (*BACKENDS, REMOTE)
"""Wherever a stage's workers may be."""
SIZES = ("read_ahead_bytes", "prefetch_bytes")
NAMES = ("workers", "backend", "fused", *SIZES)
"""The names of all knobs, and of those that are numbers of bytes: `SIZES`."""
MAX_WORKERS = 4096
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


class KnobError(UsageError):
    """A knob that cannot be: its message names the knob, the value and what would do."""


def parse_bytes(text: str | int) -> int:
    """Parses `64MiB`, `1.5GiB`, `4096` into bytes. Units are binary (KiB) or decimal (MB); no unit means bytes."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise KnobError(
            f"{text!r} is not a number of bytes; write for instance 64MiB, 1.5GiB or 1048576"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """Formats a number of bytes as a person reads it: 64 MiB, 1.5 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}"
    return f"{int(count)} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """One setting of a pipeline. No knob changes which rows come, or in which order."""

    workers: Mapping[str, int] = field(default_factory=dict)
    """The number of workers of each stage. Too few: the stage starves those after it; too many: they take cores and
    memory from the others, and from the trainer."""
    backend: Mapping[str, str] = field(default_factory=dict)
    """`thread` or `process` for each stage that can be both. Threads share memory and cost nothing to pass data;
    processes run Python code that holds the interpreter lock side by side. `remote` for reading, if a loader has
    workers elsewhere: its own ones then only ask, each for one row group at a time."""
    fused: frozenset[str] = frozenset()
    """Stages whose work is done by the workers of the stage before them. None: batches are handed over from stage to
    stage, which costs cores that are short; all: stages that differ cannot have workers, or a back end, of their
    own."""
    read_ahead_bytes: int = 64 * 2**20
    """Decoded bytes that may wait between reading and shuffling. Near 0: readers stop for every item;
    large: memory spent on what smooths nothing."""
    prefetch_bytes: int = 32 * 2**20
    """Finished batches that may wait for the trainer. Near 0: every hiccup of the pipeline reaches the trainer;
    large: memory spent on what the trainer will not need soon."""

    def __post_init__(self) -> None:
        for stage, count in self.workers.items():
            if (
                isinstance(count, bool)
                or not isinstance(count, int)
                or not 1 <= count <= MAX_WORKERS
            ):
                raise KnobError(
                    f"workers of {stage!r}: {count!r} is not a whole number from 1 to {MAX_WORKERS}"
                )
        for stage, backend in self.backend.items():
            if backend not in PLACES:
                raise KnobError(f"backend of {stage!r}: {backend!r}{nearest(str(backend), PLACES)}")
        if isinstance(self.fused, str) or not all(isinstance(stage, str) for stage in self.fused):
            raise KnobError(f"fused: {self.fused!r} is no list of stages")
        for name in SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise KnobError(f"{name}: {value!r} is not a positive number of bytes")
        object.__setattr__(self, "workers", MappingProxyType(dict(self.workers)))
        object.__setattr__(self, "backend", MappingProxyType(dict(self.backend)))
        object.__setattr__(self, "fused", frozenset(self.fused))

    @property
    def total_workers(self) -> int:
        return sum(count for stage, count in self.workers.items() if stage not in self.fused)

    def with_workers(self, **workers: int) -> Knobs:
        return replace(self, workers={**self.workers, **workers})

    def to_dict(self) -> dict[str, Any]:
        """The knobs as JSON holds them; `from_dict` is its inverse."""
        return {
            "workers": dict(self.workers),
            "backend": dict(self.backend),
            "fused": sorted(self.fused),
            "read_ahead_bytes": self.read_ahead_bytes,
            "prefetch_bytes": self.prefetch_bytes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Knobs:
        for key in values:
            if key not in NAMES:
                raise KnobError(f"unknown knob {key!r}{nearest(key, NAMES)}")
        return cls(**values)

    def parse(self, text: str) -> Knobs:
        """These knobs, changed as a command line says: `read=4,transform.backend=process,prefetch_bytes=64MiB`;
        `second.fused=yes` makes the workers of the stage before it do the second's work."""
        workers = dict(self.workers)
        backend = dict(self.backend)
        fused = set(self.fused)
        sizes = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, sign, value = (p.strip() for p in part.partition("="))
            if not sign:
                raise KnobError(f"{part!r} has no '='; write for instance read=4")
            if name in SIZES:
                sizes[name] = parse_bytes(value)
            elif name.endswith(".backend"):
                backend[name.removesuffix(".backend")] = value
            elif name.endswith(".fused"):
                if value not in ("yes", "no"):
                    raise KnobError(f"{part!r}: {value!r} is neither yes nor no")
                (fused.add if value == "yes" else fused.discard)(name.removesuffix(".fused"))
            elif re.fullmatch(r"\d+", value):
                workers[name] = int(value)
            else:
                if name not in workers:
                    raise KnobError(f"no knob {name!r}{nearest(name, (*workers, *SIZES))}")
                raise KnobError(f"{part!r}: {value!r} is not a number of workers")
        return replace(self, workers=workers, backend=backend, fused=frozenset(fused), **sizes)

    @property
    def text(self) -> str:
        """The knobs as `parse` takes them."""
        return ",".join(
            [
                *(f"{stage}={count}" for stage, count in self.workers.items()),
                *(f"{stage}.backend={backend}" for stage, backend in self.backend.items()),
                *(
                    f"{stage}.fused={'yes' if stage in self.fused else 'no'}"
                    for stage in self.workers
                ),
                *(f"{name}={getattr(self, name)}" for name in SIZES),
            ]
        )

    def __str__(self) -> str:
        def one(stage: str, count: int) -> str:
            backend = self.backend.get(stage, "thread")
            own = f"{count}({backend})" if backend != "thread" else str(count)
            return f"{stage}={'fused' if stage in self.fused else own}"

        parts = [one(stage, count) for stage, count in self.workers.items()]
        return " ".join(
            [
                *parts,
                f"read_ahead={format_bytes(self.read_ahead_bytes)}",
                f"prefetch={format_bytes(self.prefetch_bytes)}",
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The range of each knob in one pipeline on one machine."""

    workers: Mapping[str, tuple[int, int]]
    """The fewest and most workers of each stage; a stage with (1, 1) cannot be resized. Its keys are all the stages."""
    backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The back ends that each stage can use; a stage that is not named here runs on threads only."""
    fusable: Mapping[str, str] = field(default_factory=dict)
    """Maps each stage whose work the stage before it can do, on the same back end, to that stage before."""
    read_ahead_bytes: tuple[int, int] = (2**20, 2**40)
    prefetch_bytes: tuple[int, int] = (2**20, 2**40)

    def __post_init__(self) -> None:
        if not self.workers:
            raise KnobError("limits without a stage")
        for name, (low, high) in [
            *self.workers.items(),
            ("read_ahead_bytes", self.read_ahead_bytes),
            ("prefetch_bytes", self.prefetch_bytes),
        ]:
            if not 1 <= low <= high:
                raise KnobError(
                    f"limits of {name!r}: {low} to {high} is no range of positive numbers"
                )
        for stage, backends in self.backends.items():
            if stage not in self.workers or not backends or any(b not in PLACES for b in backends):
                raise KnobError(
                    f"back ends of {stage!r}: {backends!r}{nearest(stage, self.workers)}"
                )
        object.__setattr__(self, "workers", MappingProxyType(dict(self.workers)))
        for stage in [*self.fusable, *self.fusable.values()]:
            if stage not in self.workers:
                raise KnobError(f"fusable {stage!r}{nearest(stage, self.workers)}")
        object.__setattr__(self, "backends", MappingProxyType(dict(self.backends)))
        object.__setattr__(self, "fusable", MappingProxyType(dict(self.fusable)))

    def backends_of(self, stage: str) -> tuple[str, ...]:
        return self.backends.get(stage, ("thread",))

    def movable(self, stage: str, backend: str | None) -> bool:
        """Whether a stage's functions can run on threads and in processes of this host. Where workers elsewhere do its
        work, somebody has said so."""
        return backend != REMOTE and set(self.backends_of(stage)) >= set(BACKENDS)

    def head(self, knobs: Knobs, stage: str) -> str:
        """The stage whose workers do the work of `stage`: itself, or the first of those that are fused with it."""
        while stage in knobs.fused:
            stage = self.fusable[stage]
        return stage

    def fits(self, backend: Mapping[str, str], stage: str) -> bool:
        """Whether the stage before could do the work of `stage`, with such back ends. What remote workers read is taken
        in by threads of this process."""
        before = self.fusable.get(stage)
        own, other = (
            backend.get(s, "thread").replace(REMOTE, "thread") for s in (stage, before or stage)
        )
        return before is not None and own == other

    def check(self, knobs: Knobs) -> None:
        """Raises KnobError, naming the knob, its value and its range, if `knobs` are outside."""
        for stage, count in knobs.workers.items():
            low, high = self.workers.get(stage, (0, 0))
            if not high:
                raise KnobError(f"no stage {stage!r}{nearest(stage, (*self.workers, *SIZES))}")
            if not low <= count <= high:
                raise KnobError(f"workers of {stage!r}: {count} is outside {low} to {high}")
        for stage, backend in knobs.backend.items():
            if stage not in self.workers:
                raise KnobError(f"no stage {stage!r}{nearest(stage, self.workers)}")
            if backend not in self.backends_of(stage):
                raise KnobError(
                    f"backend of {stage!r}: {backend!r} is not among {self.backends_of(stage)}"
                )
        for stage in sorted(knobs.fused):
            if stage not in self.workers:
                raise KnobError(f"no stage {stage!r}{nearest(stage, self.workers)}")
            if stage not in self.fusable:
                raise KnobError(
                    f"fused: {stage!r} cannot be fused with the stage before it"
                    f"{nearest(stage, self.fusable)}"
                )
            if not self.fits(knobs.backend, stage):
                own, other = knobs.backend.get(stage, "thread"), self.fusable[stage]
                raise KnobError(
                    f"fused: {stage!r} runs on {own}, {other!r} before it on "
                    f"{knobs.backend.get(other, 'thread')}; give both the same back end"
                )
        for name in SIZES:
            low, high = getattr(self, name)
            if not low <= getattr(knobs, name) <= high:
                raise KnobError(f"{name}: {getattr(knobs, name)} is outside {low} to {high}")

    def resized(self, knobs: Knobs, workers: Mapping[str, int]) -> Knobs:
        """The knobs with so many workers of each stage, as far as the limits allow: `workers` may ask for more than
        that."""
        return self.clamp(
            replace(
                knobs, workers={s: min(count, self.workers[s][1]) for s, count in workers.items()}
            )
        )

    def clamp(self, knobs: Knobs) -> Knobs:
        """The nearest knobs within the limits; names that the pipeline lacks are left out, those not given get the
        lowest."""
        workers = {
            s: min(max(knobs.workers.get(s, low), low), high)
            for s, (low, high) in self.workers.items()
        }
        backend = {
            s: b for s, b in knobs.backend.items() if s in self.workers and b in self.backends_of(s)
        }
        sizes = {
            n: min(max(getattr(knobs, n), getattr(self, n)[0]), getattr(self, n)[1]) for n in SIZES
        }
        return Knobs(
            workers=workers,
            backend=backend,
            fused=frozenset(s for s in knobs.fused if self.fits(backend, s)),
            **sizes,
        )
