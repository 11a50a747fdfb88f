"""The faults that `--inject` causes, for users who test their own set-ups.

    --inject kill-worker@30s,stall-store=5s@10s,corrupt@part-00003,memory-spike=256MiB@20s
    --inject slow-transform=4@15s,slow-transform=1@30s,slow-store=0.5s@40%,cores=1@60%

`parse` reads the text, and `due` returns the faults that are due. `Injector` causes the faults and records them,
because a test in which no fault happened shows nothing.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.common.errors import UsageError
from sluice.ingest.knobs import KnobError, format_bytes, nearest, parse_bytes

_SPIKE_PAGE = 4096


class FaultError(UsageError):
    """A fault is invalid. The message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a fault does, and the unit of its strength."""

    what: str
    unit: str
    """The unit of its strength: `workers`, `seconds`, `bytes`, `times`, `cores`, or `` for none."""
    strength: float = 0
    """The default strength."""


KINDS: Mapping[str, Kind] = {
    "kill-worker": Kind("kills worker processes (SIGKILL)", "workers", 1),
    "stop-worker": Kind(
        "stops worker processes (SIGSTOP), as a debugger or a frozen container does", "workers", 1
    ),
    "kill-remote": Kind("kills processes of --workers local:N (SIGKILL)", "workers", 1),
    "stall-store": Kind("makes every read from the store wait", "seconds", 5),
    "slow-store": Kind("makes every later read from the store take so much longer", "seconds", 0.5),
    "corrupt": Kind(
        "flips one bit in the next read of a file whose name contains the text after the @", ""
    ),
    "slow-transform": Kind("makes every transform repeat its work so many times", "times", 4),
    "cores": Kind(
        "limits this process, or all ranks of this host together, to so many cores", "cores", 1
    ),
    "memory-spike": Kind("takes memory in this process for five seconds", "bytes", 256 * 2**20),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It is due `at_s` after the start, or when `at_percent` of an epoch are loaded. `corrupt` is due from
    the start, in files whose name contains `part`."""

    kind: str
    at_s: float = 0.0
    strength: float = 0.0
    part: str = ""
    at_percent: float = 0.0

    def __str__(self) -> str:
        unit = KINDS[self.kind].unit
        strength = {
            "seconds": f"={self.strength:g}s",
            "workers": "=all" if self.strength == float("inf") else f"={self.strength:g}",
            "times": f"={self.strength:g}",
            "cores": f"={self.strength:g}",
            "bytes": f"={format_bytes(self.strength).replace(' ', '')}",
        }.get(unit, "")
        when = f"{self.at_percent:g}%" if self.at_percent else f"{self.at_s:g}s"
        return f"{self.kind}{strength}@{self.part or when}"


def parse(text: str) -> tuple[Fault, ...]:
    """Parses faults, separated by commas: `NAME[=STRENGTH]@SECONDSs`, `NAME[=STRENGTH]@PERCENT%` (of an epoch), or
    `corrupt@PART-OF-A-FILE-NAME`."""
    return tuple(_fault(part.strip()) for part in text.split(",") if part.strip())


def _fault(text: str) -> Fault:
    head, at, when = text.partition("@")
    name, equals, strength = head.partition("=")
    if name not in KINDS:
        raise FaultError(f"--inject {text}: unknown fault {name!r}{nearest(name, KINDS)}")
    kind = KINDS[name]
    if not at or not when:
        raise FaultError(
            f"--inject {text}: say when, for instance {name}@{'part-0' if name == 'corrupt' else '30s'}"
        )
    if equals and not kind.unit:
        raise FaultError(f"--inject {text}: {name} takes no strength")
    if name == "corrupt":
        return Fault(name, part=when)
    strong = _strength(text, kind, strength) if equals else kind.strength
    if re.fullmatch(r"\d+(\.\d+)?%", when):
        return Fault(name, strength=strong, at_percent=float(when[:-1]))
    return Fault(name, _seconds(text, when), strong)


def _strength(text: str, kind: Kind, strength: str) -> float:
    if kind.unit == "seconds":
        return _seconds(text, strength)
    if kind.unit == "bytes":
        try:
            return parse_bytes(strength)
        except KnobError as error:
            raise FaultError(f"--inject {text}: {error}") from None
    if kind.unit == "cores":
        if not re.fullmatch(r"\d+(\.\d+)?", strength) or not float(strength):
            raise FaultError(f"--inject {text}: {strength!r} is not a number of cores")
        return float(strength)
    if strength == "all" and kind.unit == "workers":
        return float("inf")
    if not re.fullmatch(r"[1-9]\d*", strength):
        raise FaultError(
            f"--inject {text}: {strength!r} is not a number of {kind.unit}"
            + (", nor all" if kind.unit == "workers" else "")
        )
    return int(strength)


def _seconds(text: str, value: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?s", value):
        raise FaultError(
            f"--inject {text}: {value!r} is not a time; write for instance 30s or 0.5s (or, to say "
            "when, 40% of an epoch)"
        )
    return float(value[:-1])


def due(
    faults: Sequence[Fault], elapsed_s: float, percent: float, done: Collection[int]
) -> list[int]:
    """Returns the numbers of the faults that are due, earliest first. `percent` is the loaded share of an epoch. It
    goes on counting: 150 is the middle of the second epoch."""
    waiting = [
        n
        for n, fault in enumerate(faults)
        if n not in done and fault.at_s <= elapsed_s and fault.at_percent <= percent
    ]
    return sorted(waiting, key=lambda n: (faults[n].at_s, faults[n].at_percent))


Actor = Callable[[Fault], str | None]
"""A function that causes a fault and returns what it did. None: not possible now, try again at the next step."""


class Injector:
    """Causes faults when they are due. One thread must call `step` regularly."""

    def __init__(
        self,
        faults: Sequence[Fault],
        actors: Mapping[str, Actor],
        *,
        clock: Callable[[], float],
        epochs: Callable[[], float],
        record: Callable[[dict[str, Any]], None],
    ):
        """`actors` maps a fault's name to the function that causes it. FaultError if one is missing. `epochs` returns
        how many epochs are loaded. `record` gets one event for each fault."""
        for fault in faults:
            if fault.kind not in actors:
                raise FaultError(
                    f"--inject {fault}: this run has nothing to do it to{nearest(fault.kind, actors)}"
                )
        self._faults = tuple(faults)
        self._actors = actors
        self._clock = clock
        self._record = record
        self._epochs = epochs
        self._began = clock()
        self._done: set[int] = set()

    def step(self) -> None:
        elapsed = self._clock() - self._began
        for number in due(self._faults, elapsed, 100 * self._epochs(), self._done):
            fault = self._faults[number]
            what = self._actors[fault.kind](fault)
            if what is not None:
                self._done.add(number)
                self._record({"kind": "fault", "fault": str(fault), "did": what})

    @property
    def happened(self) -> list[str]:
        return [str(self._faults[n]) for n in sorted(self._done)]

    @property
    def missed(self) -> list[str]:
        """The requested faults that never happened, because the run was too short or had nothing to harm."""
        return [str(f) for n, f in enumerate(self._faults) if n not in self._done]


def signal_workers(pids: Callable[[], Sequence[int]], number: signal.Signals) -> Actor:
    """Makes the actor of kill-worker and stop-worker. `pids` returns the current worker processes."""

    def act(fault: Fault) -> str | None:
        hit: list[int] = []
        for pid in pids():
            if len(hit) >= fault.strength:
                break
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            hit.append(pid)
        return f"sent {number.name} to {', '.join(map(str, hit))}" if hit else None

    return act


def stall_store(stall: Callable[[float], None]) -> Actor:
    """Makes the actor of stall-store: `stall` is `FaultyFiles.stall`."""

    def act(fault: Fault) -> str:
        stall(fault.strength)
        return f"reads wait for {fault.strength:g} s"

    return act


def slow_store(slow: Callable[[float], None]) -> Actor:
    """Makes the actor of slow-store: `slow` is `FaultyFiles.slow`."""

    def act(fault: Fault) -> str:
        slow(fault.strength)
        return f"each read takes {fault.strength:g} s longer" if fault.strength else "as it was"

    return act


def corrupt_read(corrupt: Callable[[str], None]) -> Actor:
    """Makes the actor of corrupt: `corrupt` is `FaultyFiles.corrupt`."""

    def act(fault: Fault) -> str:
        corrupt(fault.part)
        return f"the next read of a file like {fault.part} has a flipped bit"

    return act


def spike_memory(later: Callable[[Callable[[], None]], None]) -> Actor:
    """Makes the actor of memory-spike. `later` schedules the function that ends the spike."""

    def act(fault: Fault) -> str:
        held = bytearray(int(fault.strength))
        # Writing makes the kernel allocate the pages.
        held[::_SPIKE_PAGE] = b"\1" * len(range(0, len(held), _SPIKE_PAGE))
        later(held.clear)
        return f"took {format_bytes(fault.strength)}"

    return act


def slow_transforms(burden: Callable[[int], None]) -> Actor:
    """Makes the actor of slow-transform: `burden` is `BatchLoader.burden`."""

    def act(fault: Fault) -> str:
        burden(int(fault.strength))
        return (
            f"transforms do their work {int(fault.strength)} times"
            if fault.strength > 1
            else "as it was"
        )

    return act


def share_cores(limit: Callable[[float], str]) -> Actor:
    """Makes the actor of cores: `limit` is `CoreShare.set`."""

    def act(fault: Fault) -> str:
        return limit(fault.strength)

    return act
