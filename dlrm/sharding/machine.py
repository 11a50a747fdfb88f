"""A machine that tables are placed on, described by its figures alone: `TrainingMachine`. Standard library only.

`8x80GB` is eight ranks of 80 GB, with eight ranks a host.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path

from sluice.common.errors import UsageError
from sluice.common.number_checks import is_number, is_whole
from sluice.ingest.knobs import KnobError, nearest, parse_bytes


class MachineError(UsageError):
    """A machine that cannot be: its message names the figure, its value and what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMachine:
    """Ranks that are all alike."""

    ranks: int
    memory_bytes: int
    """The memory of one rank's accelerator (on a CPU, its part of the host's memory)."""
    ranks_per_host: int = 8
    host_memory_bytes: int = 0
    """A rank's part of the host's memory that tables may spill to, read through the accelerator (UVM). 0: none."""
    device: str = "cuda"
    """`cuda` or `cpu`, which decides what kernels there are."""
    reserve: float = 0.15
    """Part of a rank's memory kept for what is not a table: dense layers, activations, buffers of the exchange."""

    def __post_init__(self) -> None:
        for name in ("ranks", "memory_bytes", "ranks_per_host"):
            value = getattr(self, name)
            if not is_whole(value, 1):
                raise MachineError(f"machine: {name} is {value!r}, not a whole number of 1 or more")
        if not is_whole(self.host_memory_bytes):
            raise MachineError(
                f"machine: host_memory_bytes is {self.host_memory_bytes!r}, not a whole number of 0 or more"
            )
        if self.device not in ("cuda", "cpu"):
            raise MachineError(f"machine: device is {self.device!r}, neither cuda nor cpu")
        if not is_number(self.reserve, 0, 1) or self.reserve == 1:
            raise MachineError(
                f"machine: reserve is {self.reserve!r}, not a part from 0 to below 1"
            )

    @property
    def usable_bytes(self) -> int:
        """The bytes that tables and their optimiser's state may take on one rank."""
        return int(self.memory_bytes * (1 - self.reserve))

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)


def read(text: str) -> TrainingMachine:
    """Reads `8x80GB`, or the path of a JSON file with TrainingMachine's fields (bytes may be written `80GB`)."""
    match = re.fullmatch(r"(\d+)x(.+)", text)
    if match and not Path(text).exists():
        try:
            return TrainingMachine(ranks=int(match[1]), memory_bytes=parse_bytes(match[2]))
        except KnobError as error:
            raise MachineError(f"machine {text!r}: {error}") from None
    try:
        values = json.loads(Path(text).read_text())
    except (OSError, ValueError) as error:
        raise MachineError(
            f"machine {text!r} is neither like 8x80GB nor a readable JSON file ({error})"
        ) from None
    known = [f.name for f in fields(TrainingMachine)]
    if not isinstance(values, dict):
        raise MachineError(f"machine {text}: not an object with {', '.join(known)}")
    for name in values:
        if name not in known:
            raise MachineError(f"machine {text}: no figure {name!r}{nearest(name, known)}")
    for name in ("ranks", "memory_bytes"):
        if name not in values:
            raise MachineError(f"machine {text}: {name} is missing")
    for name in ("memory_bytes", "host_memory_bytes"):
        if isinstance(values.get(name), str):
            try:
                values[name] = parse_bytes(values[name])
            except KnobError as error:
                raise MachineError(f"machine {text}: {name}: {error}") from None
    return TrainingMachine(**values)
