"""What leaving the planner's choice came to on this machine, beside what was foretold of it: `GainTrial`, `Residual`.
Pure.

Compared are rows over `TRIAL_S`, as long as the tries lasted that the advantage was learned from, with what the planner
made of it meanwhile, an undoing too: those that came, and those that the planner's own choice would have brought.
Nobody sees the latter, and the gain of an attempt (`sluice.agent.policies.planner.trial_change`) is over the rows
before. So they are taken to be
the rows before, or what the planner hoped for where it would have changed something: in simulated pipelines right in
the middle, and off by 4 to 10 % on average. Where the planner hopes for too much (a fifth, in pipelines with mechanisms
that it does not know), this errs to the side of caution. Rows that the trainer did not wait for are not missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from sluice.agent.costs.rates import PipelineRates
from sluice.ingest.knobs import Knobs

TRIAL_S = 20.0
MOST = 0.5  # a larger difference counts as this: the load may have changed meanwhile
_LASTS = 0.9  # of a try's weight, at each later one
_USUAL = 0.1  # by which tries differ from each other, as long as few are known
_PRIOR = 4.0  # tries that came as foretold, imagined before the first


@dataclass(frozen=True, slots=True, kw_only=True)
class GainTrial:
    """The planner's choice was left, and what comes of it is measured."""

    kind: str
    foretold: float
    """Rows more than by the planner's choice, as a share of what that brings."""
    rows_per_s: float
    """What the planner's choice would have brought."""
    knobs: tuple[Knobs, ...]
    """Before and after. What comes of any that the planner turns to later is none of its doing."""
    seconds: float = 0.0
    """It has lasted, and `missing`: rows that it brought less so far."""
    missing: float = 0.0
    compares: bool = True
    """Cores are as they were, so that something can be learned of it."""

    def __post_init__(self) -> None:
        if not self.rows_per_s > 0:
            raise ValueError(f"rows_per_s: {self.rows_per_s!r} is not above 0, so that no gain can be told")

    def after(self, seen: PipelineRates, knobs: Knobs) -> GainTrial:
        """One look later, at which those knobs were in force."""
        missing = min(self.rows_per_s - seen.rows_per_s, self.rows_per_s * seen.stall) * seen.seconds
        if knobs not in self.knobs:
            missing = max(0.0, missing)
        return replace(self, seconds=self.seconds + seen.seconds, missing=self.missing + missing)

    def on(self, share: float) -> GainTrial:
        """On another share of the machine: with fewer cores, fewer rows are missing."""
        return replace(self, rows_per_s=self.rows_per_s * min(1.0, share), compares=False)

    @property
    def came(self) -> float:
        """As `foretold`."""
        return -self.missing / (self.rows_per_s * self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """What came less what was foretold, over the tries of one kind of candidate. The older ones count for less."""

    tries: float = 0.0
    mean: float = 0.0
    scatter: float = 0.0
    """Sum of squares around the mean."""

    def __post_init__(self) -> None:
        for name, least, most in (("tries", 0, 1 / (1 - _LASTS)), ("mean", -MOST, MOST), ("scatter", 0, math.inf)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most + 1e-9 \
                    or not math.isfinite(value):
                raise ValueError(f"{name}: {value!r} is not a number from {least:g} to {most:g}")

    def learn(self, trial: GainTrial) -> Residual:
        came = min(MOST, max(-MOST, trial.came - trial.foretold))
        tries, off = _LASTS * self.tries + 1, came - self.mean
        mean = self.mean + off / tries
        return Residual(tries=tries, mean=mean, scatter=_LASTS * self.scatter + off * (came - mean))

    def aged(self) -> Residual:
        """A run later: it counts for half, so that what did no good is tried again some day."""
        return replace(self, tries=self.tries / 2, scatter=self.scatter / 2)

    @property
    def correction(self) -> float:
        """Of a lower bound: the mean, as far as it exceeds its standard error, less what is uncertain all the same."""
        spread = math.sqrt((_PRIOR * _USUAL**2 + self.scatter) / (_PRIOR + self.tries))
        clear = self.mean**2 * self.tries > spread**2
        shift = self.mean - spread**2 / self.tries / self.mean if clear else 0.0
        return shift - spread / math.sqrt(_PRIOR + self.tries)

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
