"""The settings that may be changed while a pipeline runs, and their ranges: `Knobs` and `Limits`.

Both are frozen and reject invalid values when they are made, so no other code checks them again. Standard library
only, because the agent imports this file and little else of the loader.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from sluice.common.errors import UsageError
from sluice.common.number_checks import is_whole
from sluice.common.suggest import NamedFields, nearest_or_way
from sluice.common.suggest import nearest as nearest  # noqa: PLC0414  for those who know the knobs

BACKENDS = ("thread", "process")
"""Where transforms may run on this host."""
REMOTE = "remote"
"""The back end of remote workers, which are other processes or other hosts (`ingest/remote`)."""
REQUESTS_A_CORE = 2
"""How many requests keep a remote worker's core busy: one is worked on while another is on its way."""
PLACES = (*BACKENDS, REMOTE)
"""All back ends."""
FETCH = "fetch"
"""The stage that gets the stored bytes of row groups from a far store. Its workers are the row groups in flight."""
DECODE = "decode"
"""The stage that decodes row groups."""
GONE = ("shuffle", "batch")
"""Stages of release 0.3 whose work the workers do that read. Their knobs are left out."""
SIZES = ("read_ahead_bytes", "prefetch_bytes")
"""The knobs that are numbers of bytes."""
NAMES = ("workers", "backend", *SIZES)
"""All knobs."""
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
    """A knob is invalid. The message names the knob and the value, and says what to do."""


def parse_bytes(text: str | int) -> int:
    """Parses `64MiB`, `1.5GiB` or `4096` into bytes. Units are binary (KiB) or decimal (MB). No unit means bytes."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise KnobError(
            f"{text!r} is not a number of bytes; write for instance 64MiB, 1.5GiB or 1048576"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """Formats a number of bytes for people: 64 MiB, 1.5 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}"
    return f"{int(count)} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs(NamedFields):
    """The settings of a pipeline. No knob changes which rows come, or in which order."""

    workers: Mapping[str, int] = field(default_factory=dict)
    """The number of workers of each stage. With too few, later stages wait. Too many take cores and memory from other
    stages and from the trainer. A worker of `fetch` is one row group in flight from the store."""
    backend: Mapping[str, str] = field(default_factory=dict)
    """`thread` or `process` for each stage that supports both. Threads share memory and pass data for free. Processes
    run Python code in parallel. `remote`: remote workers do the work, and the stage's own workers only send requests,
    one row group at a time."""
    read_ahead_bytes: int = 64 * 2**20
    """Bytes of rows that may be at their places before batches are made of them. If it is too small, readers stop for
    every item. If it is too large, it only wastes memory."""
    prefetch_bytes: int = 32 * 2**20
    """Bytes of finished batches that may wait for the trainer. If it is too small, every short delay of the pipeline
    delays the trainer. If it is too large, it only wastes memory."""
    fused: InitVar[Collection[str]] = ()
    """The stages that release 0.3 fused with the stage before them. They are left out."""

    def __post_init__(self, fused: Collection[str]) -> None:
        for stage in sorted({fused} if isinstance(fused, str) else {*fused} - {*GONE}):
            warnings.warn(
                f"fused: {stage!r} has workers of its own. Leave fused out",
                FutureWarning,
                stacklevel=3,
            )
        for name, example in (("workers", "{'decode': 2}"), ("backend", "{'mine': 'process'}")):
            if not isinstance(value := getattr(self, name), Mapping):
                raise KnobError(
                    f"{name}: {value!r} is not a dict by stage; write Knobs({name}={example})"
                )
            object.__setattr__(self, name, MappingProxyType(dict(value)))
        for stage, count in self.workers.items():
            if not is_whole(count, 1, MAX_WORKERS):
                raise KnobError(
                    f"workers of {stage!r}: {count!r} is not a whole number from 1 to {MAX_WORKERS}"
                )
        for stage, backend in self.backend.items():
            if backend not in PLACES:
                raise KnobError(f"backend of {stage!r}: {backend!r}{nearest(str(backend), PLACES)}")
        for name in SIZES:
            value = getattr(self, name)
            if not is_whole(value, 1):
                raise KnobError(f"{name}: {value!r} is not a positive number of bytes")

    @property
    def total_workers(self) -> int:
        return sum(self.workers.values())

    def with_workers(self, **workers: int) -> Knobs:
        return replace(self, workers={**self.workers, **workers})

    def to_dict(self) -> dict[str, Any]:
        """Returns the knobs as a dict for JSON. `from_dict` reads it back."""
        return {
            "workers": dict(self.workers),
            "backend": dict(self.backend),
            "read_ahead_bytes": self.read_ahead_bytes,
            "prefetch_bytes": self.prefetch_bytes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Knobs:
        for key in values:
            if key not in (*NAMES, "fused"):
                raise KnobError(f"unknown knob {key!r}{nearest(key, NAMES)}")
        return cls(**values)

    def parse(self, text: str, fetch_bytes: int = 1) -> Knobs:
        """Returns these knobs with the changes in `text`, such as
        `decode=4,transform.backend=process,prefetch_bytes=64MiB`. `fetch=64MiB` is as many row groups as take
        these bytes, with `fetch_bytes` each."""
        workers = dict(self.workers)
        backend = dict(self.backend)
        fused = []
        sizes = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, sign, value = (p.strip() for p in part.partition("="))
            if not sign:
                raise KnobError(f"{part!r} has no '='; write for instance decode=4")
            if name in SIZES:
                sizes[name] = parse_bytes(value)
            elif name.endswith(".backend"):
                backend[name.removesuffix(".backend")] = value
            elif name.endswith(".fused"):
                if value not in ("yes", "no"):
                    raise KnobError(f"{part!r}: {value!r} is neither yes nor no")
                fused += [name.removesuffix(".fused")] * (value == "yes")
            elif re.fullmatch(r"\d+", value):
                workers[name] = int(value)
            elif name == FETCH:
                workers[FETCH] = max(1, math.ceil(parse_bytes(value) / fetch_bytes))
            else:
                if name not in workers:
                    raise KnobError(f"no knob {name!r}{nearest(name, (*workers, *SIZES))}")
                raise KnobError(f"{part!r}: {value!r} is not a number of workers")
        return replace(self, workers=workers, backend=backend, fused=fused, **sizes)

    @property
    def text(self) -> str:
        """The knobs in the form that `parse` reads."""
        return ",".join(
            [
                *(f"{stage}={count}" for stage, count in self.workers.items()),
                *(f"{stage}.backend={backend}" for stage, backend in self.backend.items()),
                *(f"{name}={getattr(self, name)}" for name in SIZES),
            ]
        )

    def __str__(self) -> str:
        def one(stage: str, count: int) -> str:
            backend = self.backend.get(stage, "thread")
            return f"{stage}={count}" + (f"({backend})" if backend != "thread" else "")

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
    """The fewest and most workers of each stage. A stage with (1, 1) cannot be resized. All stages are listed."""
    backends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The back ends that each stage can use. A stage that is not listed only runs on threads."""
    read_ahead_bytes: tuple[int, int] = (2**20, 2**40)
    prefetch_bytes: tuple[int, int] = (2**20, 2**40)
    fetch_bytes: int = 1
    """The bytes of one row group in flight."""
    cores: int | None = None
    """The most cores that all stages together use. None: those of the machine."""

    def __post_init__(self) -> None:
        for name in ("workers", "backends"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def to_dict(self) -> dict[str, Any]:
        """Returns the limits as a dict for JSON. `from_dict` reads it back."""
        mappings = {name: dict(getattr(self, name)) for name in ("workers", "backends")}
        return mappings | {name: getattr(self, name) for name in (*SIZES, "fetch_bytes", "cores")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Limits:
        return cls(
            workers={stage: (low, high) for stage, (low, high) in values["workers"].items()},
            backends={stage: tuple(kinds) for stage, kinds in values["backends"].items()},
            read_ahead_bytes=tuple(values["read_ahead_bytes"]),
            prefetch_bytes=tuple(values["prefetch_bytes"]),
            fetch_bytes=values.get("fetch_bytes", 1),
            cores=values.get("cores"),
        )

    @property
    def decoding(self) -> str:
        """The first stage that does not fetch. The knob `read_ahead_bytes` limits what waits after it."""
        return next(stage for stage in self.workers if stage != FETCH)

    @property
    def asking(self) -> str:
        """The stage that sends requests to a far store."""
        return FETCH if FETCH in self.workers else self.decoding

    def backends_of(self, stage: str) -> tuple[str, ...]:
        return self.backends.get(stage, ("thread",))

    def movable(self, stage: str, backend: str | None) -> bool:
        """Whether a stage can change between threads and processes. A stage on remote workers stays there, because the
        user has chosen that."""
        return backend != REMOTE and set(self.backends_of(stage)) >= set(BACKENDS)

    def _without_gone(self, knobs: Knobs) -> Knobs:
        """Returns `knobs` without the stages of release 0.3 that this pipeline does not have."""
        gone = [stage for stage in GONE if stage in knobs.workers and stage not in self.workers]
        if not gone:
            return knobs
        warnings.warn(
            f"knobs: no stage is called {' or '.join(gone)} any more, as {DECODE} does that work. Leave it out",
            FutureWarning,
            stacklevel=3,
        )
        kept = {stage: count for stage, count in knobs.workers.items() if stage not in gone}
        return replace(knobs, workers=kept)

    def check(self, knobs: Knobs) -> Knobs:
        """Returns the knobs to apply. Raises KnobError, which names the knob, its value and its range, if `knobs`
        exceed the limits."""
        knobs = self._without_gone(knobs)
        for stage in (*knobs.workers, *knobs.backend):
            if stage not in self.workers:
                raise KnobError(
                    f"no stage {stage!r}{nearest_or_way(stage, (*self.workers, *SIZES))}"
                )
        for stage, count in knobs.workers.items():
            low, high = self.workers[stage]
            if not low <= count <= high:
                raise KnobError(
                    f"workers of {stage!r}: {count} is outside {low} to {high}"
                    + (
                        f". To get more row groups from the store at once, set {FETCH}"
                        if stage == DECODE and FETCH in self.workers
                        else ""
                    )
                )
        for stage, backend in knobs.backend.items():
            if backend not in self.backends_of(stage):
                raise KnobError(
                    f"backend of {stage!r}: {backend!r} is not among {self.backends_of(stage)}"
                )
        for name in SIZES:
            low, high = getattr(self, name)
            if not low <= getattr(knobs, name) <= high:
                raise KnobError(f"{name}: {getattr(knobs, name)} is outside {low} to {high}")
        return knobs

    def complete(self, knobs: Knobs) -> Knobs:
        """Returns the knobs with a back end for each stage that has a choice: `thread` if they name none."""
        usual = {
            s: "thread" if "thread" in kinds else kinds[0] for s, kinds in self.backends.items()
        }
        return replace(knobs, backend={**usual, **knobs.backend})

    def clamp(self, knobs: Knobs) -> Knobs:
        """Returns the nearest knobs within the limits. Drops unknown stages. Missing stages get the fewest workers.
        A stage that cannot run in threads gets its first back end."""
        wanted = dict(self._without_gone(knobs).workers)
        if FETCH in self.workers and DECODE in wanted:  # where the store was near, decoders fetched
            wanted.setdefault(FETCH, wanted[DECODE])
        workers = {
            s: min(max(wanted.get(s, low), low), high) for s, (low, high) in self.workers.items()
        }
        first = {s: kinds[0] for s, kinds in self.backends.items() if "thread" not in kinds}
        backend = first | {
            s: b for s, b in knobs.backend.items() if s in self.workers and b in self.backends_of(s)
        }
        sizes = {
            n: min(max(getattr(knobs, n), getattr(self, n)[0]), getattr(self, n)[1]) for n in SIZES
        }
        return Knobs(workers=workers, backend=backend, **sizes)
