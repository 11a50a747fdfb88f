"""Computes a learning rate from the step: `RateSchedule`. `LearningRates` sets it in the optimisers.

The rate depends only on the step, so a resumed run has the right rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from sluice.common.number_checks import is_number
from sluice.dlrm.options import ConfigError
from sluice.ingest.knobs import nearest

if TYPE_CHECKING:
    from sluice.dlrm.optim.torch_tables import TorchTables


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """Linear warm-up to the base rate, then a constant rate, then a polynomial decay down to a floor.

    All lengths are in steps. Without lengths, the rate is constant."""

    warmup: float = 0.0
    """The length of the warm-up. The first step has 1/length of the rate, not 0."""
    decay_start: float = 0.0
    """The start of the decay, counted from the start of the run."""
    decay: float = 0.0
    """The length of the decay. 0: no decay."""
    power: float = 2.0
    """The power of the decay. 1 is linear. 2 falls fast at first."""
    floor: float = 0.0
    """The share of the base rate after the decay."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not is_number(value):
                raise ConfigError(f"schedule: {name} is {value!r}, not a number of 0 or more")
        if self.floor > 1:
            raise ConfigError(f"schedule: floor is {self.floor:g}, above the base rate's 1")
        if not self.power:
            raise ConfigError("schedule: power is 0; leave out the decay for a constant rate")
        if self.decay and self.decay_start < self.warmup:
            raise ConfigError(
                f"schedule: the decay begins at {self.decay_start:g}, within the warm-up of {self.warmup:g}"
            )
        if self.decay_start and not self.decay:
            raise ConfigError(
                f"schedule: decay_start is {self.decay_start:g} but decay, its length, is 0"
            )

    @classmethod
    def read(cls, text: str) -> RateSchedule:
        """Reads `constant`, or `warmup=1000,decay_start=5000,decay=20000,power=2,floor=0.01`. Each part is optional."""
        known = [f.name for f in fields(cls)]
        values: dict[str, float] = {}
        for part in [] if text == "constant" else text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in known or not equals:
                raise ConfigError(
                    f"schedule {text!r}: {part.strip()!r}: write NAME=NUMBER, in steps"
                    f"{nearest(name, known)}"
                )
            try:
                values[name] = float(value)
            except ValueError:
                raise ConfigError(f"schedule {text!r}: {name} is {value!r}, not a number") from None
        return cls(**values)

    def factor(self, step: int) -> float:
        """Returns the factor of the base rate at step number `step`. The run's first step is 0."""
        if step < self.warmup:
            return min(1.0, (step + 1) / self.warmup)
        if not self.decay or step < self.decay_start:
            return 1.0
        left = max(0.0, 1 - (step - self.decay_start) / self.decay)
        return float(self.floor + (1 - self.floor) * left**self.power)


class LearningRates:
    """Sets the rates of optimisers by their schedules."""

    def __init__(
        self, scheduled: Sequence[tuple[Any, RateSchedule]], in_torch: Sequence[TorchTables] = ()
    ) -> None:
        """The first optimiser updates tables within the backward pass (`model.fused_optimizer`). `in_torch` are tables
        that round at random, by the step."""
        # The rates are read now, because a checkpoint that is loaded later replaces them by those of its step.
        self._scheduled = [
            (optimiser, schedule, [float(group["lr"]) for group in optimiser.param_groups])
            for optimiser, schedule in scheduled
        ]
        self._in_torch = in_torch

    def set_step(self, step: int) -> None:
        """Sets the rates of step number `step`. Call it before the forward pass. The run's first step is 0."""
        for optimiser, schedule, rates in self._scheduled:
            factor = schedule.factor(step)
            for group, base in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = base * factor
        self._scheduled[0][0].step()  # only passes the new rate to the kernel
        for tables in self._in_torch:
            tables.step = step
