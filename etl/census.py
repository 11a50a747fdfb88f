"""Where the rows of a version lie: `Census`, by which two versions are compared. `trained_on` says what share of a
split a run has seen, `there_already` how many rows of an append a table has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etl.identity import Identity, SplitMoved
from etl.record import JobRecord
from etl.sketch import Sketch
from etl.spec import Spec

TRAIN = "train"
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Census:
    """What is known of the rows of some jobs."""

    rule: Identity | None = None
    """By what they are known; None if the jobs have several rules, or say nothing of one."""
    settings: Settings = field(default_factory=dict)
    """How splits are cut."""
    sketches: Mapping[str, Mapping[str, Sketch]] = field(default_factory=dict)
    """`Identity.recognition` → split → its rows; only where every job has one."""

    @classmethod
    def of(cls, records: Iterable[JobRecord]) -> Census:
        records = sorted(records, key=lambda r: r.version)
        rules, settings = [rule_of(r) for r in records], [_settings(r) for r in records]
        rule = rules[-1] if rules else None
        if rule is None or not all(r is not None and r.same(rule) and s == settings[-1]
                                   for r, s in zip(rules, settings, strict=True)):
            rule = None
        common = set.intersection(*(set(r.sketches) for r in records)) if records else set()
        sketches: dict[str, dict[str, Sketch]] = {}
        for recognition in sorted(common):
            found: dict[str, list[Sketch]] = {}
            for record in records:
                for split, sketch in record.sketches[recognition].items():
                    found.setdefault(split, []).append(Sketch.from_json(sketch))
            sketches[recognition] = {split: Sketch.joined(parts) for split, parts in found.items()}
        return cls(rule=rule, settings=settings[-1] if settings else {}, sketches=sketches)

    @property
    def trained(self) -> Census:
        """Of the rows that a run trains on: those of `train` that lie in no other split."""
        sketches = {recognition: {TRAIN: splits[TRAIN].without(s for n, s in splits.items() if n != TRAIN)}
                    for recognition, splits in self.sketches.items() if TRAIN in splits}
        return Census(rule=self.rule, settings=self.settings, sketches=sketches)

    def and_then(self, later: Census) -> Census:
        """Of the rows of both, where they can be told from each other; else of the later ones."""
        common = self.sketches.keys() & later.sketches.keys()
        if not common:
            return later
        return Census(rule=later.rule, settings=later.settings, sketches={
            recognition: {TRAIN: Sketch.joined(s[recognition].get(TRAIN, Sketch()) for s in (self.sketches,
                                                                                             later.sketches))}
            for recognition in sorted(common)})

    def to_json(self) -> dict[str, Any]:
        return {"rule": self.rule.to_json() if self.rule else None, "settings": dict(self.settings),
                "sketches": {recognition: {split: sketch.to_json() for split, sketch in splits.items()}
                             for recognition, splits in self.sketches.items()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Census:
        return cls(rule=Identity.from_json(value["rule"]) if value["rule"] else None, settings=value["settings"],
                   sketches={recognition: {split: Sketch.from_json(sketch) for split, sketch in splits.items()}
                             for recognition, splits in value["sketches"].items()})


def rule_of(record: JobRecord) -> Identity | None:
    """By what a job's rows are known; older programs hashed all input columns of their spec."""
    return record.identity or (Spec.parse(record.spec).rule if record.spec else None)


def _settings(record: JobRecord) -> dict[str, Any]:
    if not record.spec:
        return {}
    table = Spec.parse(record.spec).table
    return {"split": dict(table.split), "split_by": list(table.split_by), "split_column": table.split_column,
            "split_time": table.split_time, "split_from": list(table.split_from)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What of a version's splits was trained on in another."""

    shares: Mapping[str, float]
    exact: bool

    @property
    def text(self) -> str:
        """For a person; empty if nothing was."""
        about = "" if self.exact else "about "
        return " and ".join(f"{about}{_percent(share)} of the rows of split {split!r}"
                            for split, share in self.shares.items() if share)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def trained_on(before: Census, after: Census) -> Seen:
    """What share of each split of `after` lies in what was trained on `before`; `SplitMoved` if nobody can know."""
    shares: dict[str, float] = {}
    exact = True
    common = before.sketches.keys() & after.sketches.keys()
    for recognition in sorted(common):
        trained = before.sketches[recognition].get(TRAIN, Sketch())
        for split, sketch in after.sketches[recognition].items():
            if split != TRAIN:
                shares[split] = max(shares.get(split, 0.0), sketch.share_in(trained))
                exact &= sketch.whole and trained.whole
    if common or (before.rule is None and after.rule is None and not before.settings and not after.settings):
        return Seen(shares=shares, exact=exact)  # tables that no job made have neither rules nor splits by them
    if before.rule is None or after.rule is None or not before.rule.same(after.rule):
        raise SplitMoved("its rows are known by other columns than those that were trained on, so which of them these "
                         f"are cannot be known ({_words(before.rule)}; now {_words(after.rule)})")
    if before.settings != after.settings:
        raise SplitMoved("its splits are cut in another way, and the versions are too old to know which rows moved")
    return Seen(shares=shares, exact=exact)


def _words(rule: Identity | None) -> str:
    return "several rules" if rule is None else f"{rule.text}, by seed {rule.seed}"


def there_already(before: Census, now: Census, rows: int) -> tuple[int, bool] | None:
    """How many of an append's rows a table has, and whether that is exact; None if nobody can know."""
    common = before.sketches.keys() & now.sketches.keys()
    if not common:
        return None
    both = [Sketch.joined(census.sketches[min(common)].values()) for census in (now, before)]
    return round(rows * both[0].share_in(both[1])), both[0].whole and both[1].whole
