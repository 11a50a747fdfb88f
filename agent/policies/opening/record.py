"""What a run leaves of its opening, to learn from: `OpeningRecord`. Numbers only: stages are numbered, and neither data
nor names are in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from sluice.agent.policies.opening.contract import (
    ColumnGroup,
    Foreknowledge,
    InitialSetting,
    PolicyInput,
)
from sluice.ingest.knobs import Knobs, Limits
from sluice.ingest.stats import Snapshot

FORMAT = 1
WATCHED_S = 30.0
"""For so many seconds after the initial setting, each look is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpeningRecord:
    """What was seen at the first look, what was chosen, what came, and on what the planner settled."""

    given: PolicyInput
    opening: InitialSetting
    own: Knobs
    """The knobs that the planner would have chosen by itself."""
    tried: bool = False
    """Whether the initial setting was put in force."""
    came: tuple[tuple[float, int], ...] = ()
    """Seconds since the first look → rows since then, at each look of the first while."""
    settled: Knobs | None = None
    """The knobs at the end; None while the run goes on."""
    rows_per_s: float | None = None
    """The rate from the end of that while, or if the run was shorter from the first look, to the end of the run."""

    def later(self, snapshot: Snapshot) -> OpeningRecord:
        """The record with one more look."""
        seconds = snapshot.at - self.given.seen.at
        if seconds <= 0 or seconds > WATCHED_S:
            return self
        return replace(
            self, came=(*self.came, (round(seconds, 3), snapshot.rows - self.given.seen.rows))
        )

    def ended(self, knobs: Knobs, last: Snapshot) -> OpeningRecord:
        """The record at the end of the run."""
        seconds, rows = last.at - self.given.seen.at, last.rows - self.given.seen.rows
        before_s, before = self.came[-1] if seconds > WATCHED_S and self.came else (0.0, 0)
        return replace(
            self,
            settled=knobs,
            rows_per_s=(rows - before) / (seconds - before_s) if seconds > 0 else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON holds it, with numbers for the stages' names; `from_dict` is its inverse but for those."""
        names = {stage.name: f"stage{n}" for n, stage in enumerate(self.given.seen.stages)}
        given = self.given

        def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
            return {names[name]: value for name, value in values.items()}

        def knobs(one: Knobs | None) -> dict[str, Any] | None:
            return (
                None
                if one is None
                else replace(
                    one,
                    workers=renamed(one.workers),
                    backend=renamed(one.backend),
                    fused=frozenset(names[name] for name in one.fused),
                ).to_dict()
            )

        def look(snapshot: Snapshot) -> dict[str, Any]:
            return replace(
                snapshot, stages=tuple(replace(s, name=names[s.name]) for s in snapshot.stages)
            ).to_dict()

        limits, known = given.limits, given.known
        return {
            "format": FORMAT,
            "begun": look(given.begun),
            "seen": look(given.seen),
            "knobs": knobs(given.knobs),
            "limits": {
                "workers": renamed(limits.workers),
                "backends": renamed(limits.backends),
                "fusable": {names[n]: names[before] for n, before in limits.fusable.items()},
                "read_ahead_bytes": limits.read_ahead_bytes,
                "prefetch_bytes": limits.prefetch_bytes,
            },
            "known": {
                "columns": None
                if known.columns is None
                else {kind: asdict(group) for kind, group in known.columns.items()},
                "operators": None
                if known.operators is None
                else {names[n]: kind for n, kind in known.operators.items() if n in names},
                "store": known.store,
                "row_group_rows": known.row_group_rows,
                "row_group_bytes": known.row_group_bytes,
            },
            "process_bytes": given.process_bytes,
            "opening": {
                "knobs": knobs(self.opening.knobs),
                "inside": self.opening.inside,
                "rows_per_s": self.opening.rows_per_s,
            },
            "own": knobs(self.own),
            "tried": self.tried,
            "came": [list(one) for one in self.came],
            "settled": knobs(self.settled),
            "settled_rows_per_s": self.rows_per_s,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OpeningRecord:
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']!r} of an opening's record is not {FORMAT}")
        known = values["known"]
        limits = values["limits"]
        opening = values["opening"]
        columns = known["columns"]
        return cls(
            given=PolicyInput(
                begun=Snapshot.from_dict(values["begun"]),
                seen=Snapshot.from_dict(values["seen"]),
                knobs=Knobs.from_dict(values["knobs"]),
                process_bytes=values["process_bytes"],
                limits=Limits(
                    workers={n: (low, high) for n, (low, high) in limits["workers"].items()},
                    fusable=limits["fusable"],
                    backends={n: tuple(kinds) for n, kinds in limits["backends"].items()},
                    read_ahead_bytes=tuple(limits["read_ahead_bytes"]),
                    prefetch_bytes=tuple(limits["prefetch_bytes"]),
                ),
                known=Foreknowledge(
                    **{
                        **known,
                        "columns": None
                        if columns is None
                        else {kind: ColumnGroup(**group) for kind, group in columns.items()},
                    }
                ),
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
