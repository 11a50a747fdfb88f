"""A machine that tables are placed on, described by its figures alone: `TrainingMachine`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sluice.common.errors import UsageError
from sluice.ingest.knobs import KnobError, parse_bytes


class MachineError(UsageError):
    """A machine that cannot exist. The message names the figure, its value and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMachine:
    """Ranks that are all alike."""

    ranks: int
    memory_bytes: int
    """The memory of one rank's accelerator (on a CPU, its part of the host's memory)."""
    host_memory_bytes: int = 0
    """A rank's part of the host's memory that tables may spill to, read through the accelerator (UVM). 0: none."""
    device: str = "cuda"
    """`cuda` or `cpu`, which decides what kernels there are."""
    cores: int = 1
    """The processor cores of one rank."""
    reserve: float = 0.15
    """Part of a rank's memory kept for what is not a table: dense layers, activations, buffers of the exchange."""

    def __post_init__(self) -> None:
        if min(self.ranks, self.memory_bytes) < 1:
            raise MachineError(
                f"machine: {self.ranks} ranks of {self.memory_bytes} bytes; both must be 1 or more"
            )

    @property
    def usable_bytes(self) -> int:
        """The bytes that tables and their optimiser's state may take on one rank."""
        return int(self.memory_bytes * (1 - self.reserve))


def read(text: str) -> TrainingMachine:
    """Reads RANKSxMEMORY: `8x80GB` is eight ranks of 80 GB."""
    match = re.fullmatch(r"(\d+)x(.+)", text)
    if match is None:
        raise MachineError(f"machine {text!r} is not RANKSxMEMORY, like 8x80GB")
    try:
        return TrainingMachine(ranks=int(match[1]), memory_bytes=parse_bytes(match[2]))
    except KnobError as error:
        raise MachineError(f"machine {text!r}: {error}") from None
