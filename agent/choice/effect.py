"""What earlier choices brought: `Effects`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sluice.ingest.knobs import Knobs

_KEPT = 8  # settings that are remembered


@dataclass(frozen=True, slots=True)
class Effect:
    """A setting that was in force, with its last measured rate."""

    knobs: Knobs
    rows_per_s: float
    tick: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """The settings of a run with their rates, and the times of its changes. Ticks count time."""

    settings: tuple[Effect, ...] = ()
    """The latest ones, the last measured at the end."""
    changes: tuple[float, ...] = ()
    """The ticks of the latest changes."""
    event: float | None = None
    """The tick of the last event that made earlier rates meaningless: a fault, or other cores. None: there was none."""
    rate_before: float = 0.0
    """The rate before the last change."""

    def measured(self, knobs: Knobs, rows_per_s: float, tick: float) -> Effects:
        """Returns the effects with the rate of the knobs in force."""
        others = [effect for effect in self.settings if effect.knobs != knobs]
        return replace(self, settings=(*others, Effect(knobs, rows_per_s, tick))[-_KEPT:])

    def broken_off(self, tick: float) -> Effects:
        """Returns the effects after an event that changed the pipeline or the machine."""
        return replace(self, settings=(), event=tick)

    def changed(self, rate_before: float, tick: float) -> Effects:
        """Returns the effects after a change."""
        return replace(self, changes=(*self.changes, tick)[-_KEPT:], rate_before=rate_before)

    @property
    def best(self) -> Effect | None:
        """The setting with the highest rate."""
        return max(self.settings, key=lambda effect: effect.rows_per_s, default=None)

    def of(self, knobs: Knobs) -> Effect | None:
        """Returns the effect of these knobs, if they were in force."""
        return next((effect for effect in self.settings if effect.knobs == knobs), None)
