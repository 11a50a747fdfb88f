"""How a learning rate changes over a run: a pure function of the step, and a class that sets it in an optimiser.

Nothing is remembered from step to step, so a resumed run goes on with the right rate by itself."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from sluice.dlrm.options import ConfigError
from sluice.ingest.knobs import nearest

UNITS = ("step", "epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSchedule:
    """Linear warm-up to the base rate, a constant stretch, a polynomial decay, then its floor for ever.

    All lengths are in `by`'s unit; with none of them, the rate is constant."""

    warmup: float = 0.0
    """Length of the rise. The first step already has one part of the rate, not 0."""
    decay_start: float = 0.0
    """Where the decay begins, counted from the run's start."""
    decay: float = 0.0
    """Length of the decay; 0: none."""
    power: float = 2.0
    """1 is a straight line down; 2 falls fast at first."""
    floor: float = 0.0
    """Part of the base rate that is left after the decay."""
    by: str = "step"

    def __post_init__(self) -> None:
        if self.by not in UNITS:
            raise ConfigError(f"schedule: by {self.by!r} is none of {', '.join(UNITS)}")
        for name in ("warmup", "decay_start", "decay", "power", "floor"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < float("inf")
            ):
                raise ConfigError(f"schedule: {name} is {value!r}, not a number of 0 or more")
        if self.floor > 1:
            raise ConfigError(f"schedule: floor is {self.floor:g}, above the base rate's 1")
        if not self.power:
            raise ConfigError("schedule: power is 0; leave out the decay for a constant rate")
        if self.decay and self.decay_start < self.warmup:
            raise ConfigError(
                f"schedule: the decay begins at {self.decay_start:g}, within the warm-up of "
                f"{self.warmup:g}"
            )
        if self.decay_start and not self.decay:
            raise ConfigError(
                f"schedule: decay_start is {self.decay_start:g} but decay, its length, is 0"
            )

    @classmethod
    def read(cls, text: str) -> RateSchedule:
        """Reads `constant`, or `warmup=1000,decay_start=5000,decay=20000,power=2,floor=0.01,by=epoch`, any part left
        out."""
        known = [f.name for f in fields(cls)]
        values: dict[str, Any] = {}
        for part in [] if text == "constant" else text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in known or not equals:
                raise ConfigError(
                    f"schedule {text!r}: {part.strip()!r}: write NAME=NUMBER, or constant"
                    f"{nearest(name, known)}"
                )
            try:
                values[name] = value if name == "by" else float(value)
            except ValueError:
                raise ConfigError(f"schedule {text!r}: {name} is {value!r}, not a number") from None
        return cls(**values)

    def in_steps(self, steps_per_epoch: int) -> RateSchedule:
        """The same schedule with its lengths in steps."""
        if self.by == "step":
            return self
        return replace(
            self,
            by="step",
            warmup=self.warmup * steps_per_epoch,
            decay=self.decay * steps_per_epoch,
            decay_start=self.decay_start * steps_per_epoch,
        )

    def factor(self, step: int) -> float:
        """The factor of the base rate at step number `step`, the run's first being 0."""
        if self.by != "step":
            raise ConfigError("schedule: lengths are in epochs; ask in_steps first")
        if step < self.warmup:
            return min(1.0, (step + 1) / self.warmup)
        if not self.decay or step < self.decay_start:
            return 1.0
        left = max(0.0, 1 - (step - self.decay_start) / self.decay)
        return float(self.floor + (1 - self.floor) * left**self.power)


class HasGroups(Protocol):
    """torch's Optimizer, TorchRec's KeyedOptimizer, and whatever wraps them."""

    @property
    def param_groups(self) -> Any: ...
    def step(self, closure: Any = None) -> Any: ...


class Scheduled:
    """An optimiser whose rates follow a schedule: call `begin(step)` before each forward pass.

    `fused` marks an optimiser that updates tables within the backward pass (`model.fused_optimizer`): its kernel takes
    the new rate when its `step` is called, and `step` does nothing else."""

    def __init__(
        self,
        optimiser: HasGroups,
        schedule: RateSchedule,
        *,
        steps_per_epoch: int,
        fused: bool = False,
    ) -> None:
        self._optimiser = optimiser
        self._schedule = schedule.in_steps(steps_per_epoch)
        self._fused = fused
        # Taken now: a checkpoint loaded later brings the rates of the step at which it was saved.
        self._base = [float(group["lr"]) for group in optimiser.param_groups]

    def begin(self, step: int) -> float:
        """Sets the rates for this step; returns the first group's, or 0 on a rank that holds no part of it."""
        factor = self._schedule.factor(step)
        for group, base in zip(self._optimiser.param_groups, self._base, strict=True):
            group["lr"] = base * factor
        if self._fused:
            self._optimiser.step()
        return self._base[0] * factor if self._base else 0.0
