"""A run's record of its initial setting, for later training: `OpeningRecord`.

It holds numbers only, no data and no names. Stages are numbered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sluice.agent.policies.opening.contract import Foreknowledge, InitialSetting, PolicyInput
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

FORMAT = 1
WATCHED_S = 30.0
"""Each look in this time after the initial setting is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningRecord:
    """The first look, the chosen setting, its effect, and the knobs on which the planner settled."""

    given: PolicyInput
    opening: InitialSetting
    own: Knobs
    """The planner's own choice."""
    tried: bool = False
    """Whether the initial setting was put in force."""
    came: tuple[tuple[float, int], ...] = ()
    """Pairs of seconds and rows since the first look, for each look in the first `WATCHED_S`."""
    settled: Knobs | None = None
    """The knobs at the end. None until the run has ended."""
    rows_per_s: float | None = None
    """The rate after the first `WATCHED_S`. If the run was shorter: since the first look."""

    def later(self, snapshot: Snapshot) -> OpeningRecord:
        """Returns the record with one more look."""
        seconds = snapshot.at - self.given.seen.at
        if seconds <= 0 or seconds > WATCHED_S:
            return self
        return replace(
            self, came=(*self.came, (round(seconds, 3), snapshot.rows - self.given.seen.rows))
        )

    def ended(self, knobs: Knobs, last: Snapshot) -> OpeningRecord:
        """Returns the record at the end of the run."""
        seconds, rows = last.at - self.given.seen.at, last.rows - self.given.seen.rows
        before_s, before = self.came[-1] if seconds > WATCHED_S and self.came else (0.0, 0)
        return replace(
            self,
            settled=knobs,
            rows_per_s=(rows - before) / (seconds - before_s) if seconds > 0 else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the record for JSON, with numbers in place of the stages' names. `from_dict` reads it."""
        given = self.given
        names = {stage.name: f"stage{n}" for n, stage in enumerate(given.seen.stages)}
        limits, known = given.limits, given.known
        operators = known.operators
        return {
            "format": FORMAT,
            "begun": _renamed_snapshot(given.begun, names),
            "seen": _renamed_snapshot(given.seen, names),
            "knobs": _renamed_knobs(given.knobs, names),
            "limits": replace(
                limits,
                workers=_renamed(limits.workers, names),
                backends=_renamed(limits.backends, names),
                fusable={names[n]: names[before] for n, before in limits.fusable.items()},
            ).to_dict(),
            "known": replace(
                known, operators=None if operators is None else _renamed(operators, names)
            ).to_dict(),
            "process_bytes": given.process_bytes,
            "opening": {
                "knobs": _renamed_knobs(self.opening.knobs, names),
                "inside": self.opening.inside,
                "rows_per_s": self.opening.rows_per_s,
            },
            "own": _renamed_knobs(self.own, names),
            "tried": self.tried,
            "came": [list(one) for one in self.came],
            "settled": None if self.settled is None else _renamed_knobs(self.settled, names),
            "settled_rows_per_s": self.rows_per_s,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OpeningRecord:
        if values["format"] != FORMAT:
            raise ValueError(
                f"format {values['format']!r} of a record of an initial setting is not {FORMAT}"
            )
        opening = values["opening"]
        return cls(
            given=PolicyInput(
                begun=Snapshot.from_dict(values["begun"]),
                seen=Snapshot.from_dict(values["seen"]),
                knobs=Knobs.from_dict(values["knobs"]),
                process_bytes=values["process_bytes"],
                limits=Limits.from_dict(values["limits"]),
                known=Foreknowledge.from_dict(values["known"]),
            ),
            opening=InitialSetting(
                **{**opening, "knobs": Knobs.from_dict(opening["knobs"]), "reason": ""}
            ),
            own=Knobs.from_dict(values["own"]),
            tried=values["tried"],
            came=tuple((float(seconds), int(rows)) for seconds, rows in values["came"]),
            settled=None if values["settled"] is None else Knobs.from_dict(values["settled"]),
            rows_per_s=values["settled_rows_per_s"],
        )


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[name]: value for name, value in values.items() if name in names}


def _renamed_knobs(knobs: Knobs, names: Mapping[str, str]) -> dict[str, Any]:
    return replace(
        knobs,
        workers=_renamed(knobs.workers, names),
        backend=_renamed(knobs.backend, names),
        fused=frozenset(names[name] for name in knobs.fused),
    ).to_dict()


def _renamed_snapshot(snapshot: Snapshot, names: Mapping[str, str]) -> dict[str, Any]:
    stages = tuple(replace(stage, name=names[stage.name]) for stage in snapshot.stages)
    return replace(snapshot, stages=stages).to_dict()
