"""What was tried since the last event: `Trials`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sluice.ingest.knobs import Knobs

Layout = tuple[tuple[str, str], ...]
_MOST_DOUBLINGS = 5


def layout(knobs: Knobs) -> Layout:
    """Returns the stages that do not run in threads, with their back ends."""
    return tuple(sorted((n, b) for n, b in knobs.backend.items() if b != "thread"))


def _setting(knobs: Knobs) -> tuple[tuple[tuple[str, int], ...], Layout]:
    return tuple(sorted(knobs.workers.items())), layout(knobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """How often each setting was taken since the last event, and how far the model was off in each layout."""

    visits: Mapping[object, int] = field(default_factory=dict)
    off: Mapping[Layout, tuple[float, float]] = field(default_factory=dict)
    """Layout → (logarithm of the measured rate over the modelled rate, when)."""

    def forget(self) -> Trials:
        """Returns the trials after an event: each setting may bring something new."""
        return replace(self, visits={})

    def leave(self, before: Knobs, after: Knobs) -> Trials:
        """Returns the trials with one more visit of `after`."""
        visits = {**self.visits, _setting(before): max(1, self.count(before))}
        return replace(self, visits={**visits, _setting(after): self.count(after) + 1})

    def count(self, knobs: Knobs) -> int:
        """Returns how often a setting was taken. Another visit teaches nothing new."""
        return self.visits.get(_setting(knobs), 0)

    def price(self, knobs: Knobs, price: float) -> float:
        """Returns the price of a visit. It doubles with each one."""
        return price * float(2 ** min(self.count(knobs), _MOST_DOUBLINGS))

    def check(self, knobs: Knobs, off: float, at: float) -> Trials:
        """Returns the trials with one more comparison of the model with what was measured."""
        old = self.off.get(layout(knobs))
        mean = off if old is None else old[0] + 0.5 * (off - old[0])
        return replace(self, off={**self.off, layout(knobs): (mean, at)})

    def checked_since(self, knobs: Knobs, at: float) -> bool:
        """Whether the model of this layout was compared with a measurement since then."""
        return self.off.get(layout(knobs), (0.0, float("-inf")))[1] >= at

    def error(self, here: Knobs, there: Knobs) -> float:
        """Returns how far the model is off in one layout against another. Within one layout it errs alike."""
        if layout(here) == layout(there) or not {layout(here), layout(there)} <= self.off.keys():
            return 0.0
        return self.off[layout(there)][0] - self.off[layout(here)][0]
