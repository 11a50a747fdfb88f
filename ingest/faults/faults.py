"""The faults that `--inject` causes, for users who test their own set-ups.

    --inject kill-worker@30s,stall-store=5s@10s,corrupt@part-00003
    --inject slow-transform=4@15s,slow-transform=1@30s,slow-store=0.5s@40%,cores=1@60%

`parse` reads the text, and `due` returns the faults that are due. `Injection` causes them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sluice.common.errors import UsageError
from sluice.ingest.knobs import nearest


class FaultError(UsageError):
    """A fault is invalid. The message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a fault does, and the unit of its strength."""

    what: str
    unit: str
    """The unit of its strength: `workers`, `seconds`, `times`, `cores`, or `` for none."""
    strength: float = 0
    """The default strength."""


KINDS: Mapping[str, Kind] = {
    "kill-worker": Kind("kills worker processes (SIGKILL)", "workers", 1),
    "kill-remote": Kind("kills processes of --workers local:N (SIGKILL)", "workers", 1),
    "stall-store": Kind("makes every read from the store wait", "seconds", 5),
    "slow-store": Kind("makes every later read from the store take so much longer", "seconds", 0.5),
    "corrupt": Kind(
        "flips one bit in the next read of a file whose name contains the text after the @", ""
    ),
    "slow-transform": Kind("makes every transform repeat its work so many times", "times", 4),
    "cores": Kind(
        "pins this process, or all ranks of this host together, to so many cores", "cores", 1
    ),
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
        number = "all" if self.strength == float("inf") else f"{self.strength:g}"
        strength = unit and f"={number}" + "s" * (unit == "seconds")
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
    strong = kind.strength
    if strength == "all" and kind.unit == "workers":
        strong = float("inf")
    elif equals and kind.unit == "seconds":
        strong = _seconds(text, strength)
    elif equals:
        if not re.fullmatch(r"[1-9]\d*", strength):
            raise FaultError(
                f"--inject {text}: {strength!r} is not a whole number of {kind.unit}"
                + (", nor all" if kind.unit == "workers" else "")
            )
        strong = int(strength)
    if re.fullmatch(r"\d+(\.\d+)?%", when):
        return Fault(name, strength=strong, at_percent=float(when[:-1]))
    return Fault(name, _seconds(text, when), strong)


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
    waiting = sorted(
        (fault.at_s, fault.at_percent, number)
        for number, fault in enumerate(faults)
        if number not in done and fault.at_s <= elapsed_s and fault.at_percent <= percent
    )
    return [number for *_, number in waiting]
