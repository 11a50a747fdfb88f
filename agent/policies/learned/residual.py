"""`GainTrial`, `Residual`: results of departures from the planner's choice, compared with predictions. Pure.

`GainTrial` compares the rows that came over `TRIAL_S`, including what the planner did meanwhile, even if it undid the
change, with those that the planner's own choice would have brought. The tries that the advantage was learned from
lasted as long. Nobody sees what the planner's choice would have brought, and the gain of an attempt
(`sluice.agent.policies.planner.trial_change`) is over the rows before. So they are taken to be the rows before, or what
the planner hoped for where it would have changed something: in simulated pipelines the median is right, and the mean
error is 4 to 10 %. Where the planner hopes for too much (a fifth, in pipelines with mechanisms that it does not know),
this errs on the side of caution. Rows that the trainer did not wait for are not missed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from sluice.agent.costs.rates import PipelineRates
from sluice.ingest.knobs import Knobs

TRIAL_S = 20.0
MOST = 0.5  # a larger difference counts as this: the load may have changed meanwhile
_LASTS = 0.9  # of a try's weight is left at each later one
_USUAL = 0.1  # by so much tries differ from each other, as long as few are known
_PRIOR = 4.0  # imagined tries before the first that came out as predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class GainTrial:
    """Measures the result of one departure from the planner's choice."""

    kind: str
    foretold: float
    """The additional rows that were predicted over the planner's choice, as a share of what that brings."""
    rows_per_s: float
    """The rate that the planner's choice would have brought."""
    knobs: tuple[Knobs, ...]
    """The knobs before and after. Gains under knobs that the planner chooses later are not counted for this
    departure."""
    seconds: float = 0.0
    """How long the trial has lasted; `missing` has the rows that it has lost so far."""
    missing: float = 0.0
    compares: bool = True
    """Whether the cores are as they were, so that something can be learned from the trial."""

    def __post_init__(self) -> None:
        if not self.rows_per_s > 0:
            raise ValueError(f"rows_per_s: {self.rows_per_s!r} is not above 0, so that no gain can be told")

    def after(self, seen: PipelineRates, knobs: Knobs) -> GainTrial:
        """The trial one look later, when those knobs were in force."""
        missing = min(self.rows_per_s - seen.rows_per_s, self.rows_per_s * seen.stall) * seen.seconds
        if knobs not in self.knobs:
            missing = max(0.0, missing)
        return replace(self, seconds=self.seconds + seen.seconds, missing=self.missing + missing)

    def on(self, share: float) -> GainTrial:
        """The trial on another share of the machine: with fewer cores, fewer rows are missing."""
        return replace(self, rows_per_s=self.rows_per_s * min(1.0, share), compares=False)

    @property
    def came(self) -> float:
        """The gain that came, in the units of `foretold`."""
        return -self.missing / (self.rows_per_s * self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """The gain that came less the predicted one, over the tries of one kind of candidate. Older ones count for less."""

    tries: float = 0.0
    mean: float = 0.0
    scatter: float = 0.0
    """The sum of squares around the mean."""

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
        """The same for the next run: it counts for half, so that what did no good is tried again some day."""
        return replace(self, tries=self.tries / 2, scatter=self.scatter / 2)

    @property
    def correction(self) -> float:
        """The correction of a lower bound: the mean, as far as it exceeds its standard error, less the uncertainty that
        is left."""
        spread = math.sqrt((_PRIOR * _USUAL**2 + self.scatter) / (_PRIOR + self.tries))
        clear = self.mean**2 * self.tries > spread**2
        shift = self.mean - spread**2 / self.tries / self.mean if clear else 0.0
        return shift - spread / math.sqrt(_PRIOR + self.tries)

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
