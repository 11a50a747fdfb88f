"""`SplitRows`: the rows of a version's splits, to compare two versions.

`trained_on` returns the share of a split that a run has seen. `count_repeated_rows` counts the rows of an append that a
table already has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from sluice.etl.spec.row_identity import Identity, SplitMoved
from sluice.etl.spec.spec import Spec
from sluice.etl.table.job_record import JobRecord
from sluice.etl.table.sketch import Sketch

TRAIN = "train"
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SplitRows:
    """The rows of some jobs, as far as their records describe them."""

    jobs: tuple[str, ...] = ()
    rule: Identity | None = None
    """The rule by which the rows are recognised. None if the jobs have several rules, or record none."""
    settings: Settings = field(default_factory=dict)
    """The settings that decide how splits are cut."""
    sketches: Mapping[str, Mapping[str, Sketch]] = field(default_factory=dict)
    """`Identity.recognition` → split → sketch of its rows. Holds only recognitions that every job has."""

    @classmethod
    def of(cls, records: Iterable[JobRecord]) -> SplitRows:
        records = sorted(records, key=lambda r: r.version)
        rules, settings = [r.identity for r in records], [_settings(r) for r in records]
        rule = rules[-1] if rules else None
        if rule is None or not all(
            r is not None and s == settings[-1] and (r.is_same(rule) or s.get("split_time"))
            for r, s in zip(rules, settings, strict=True)
        ):
            rule = None
        common = set.intersection(*(set(r.sketches) for r in records)) if records else set()
        by_recognition: dict[str, dict[str, list[Sketch]]] = {}
        for recognition in sorted(common):
            of_splits = by_recognition[recognition] = {}
            for record in records:
                for split, sketch in record.sketches[recognition].items():
                    of_splits.setdefault(split, []).append(Sketch.from_json(sketch))
        return cls(
            jobs=tuple(r.job for r in records),
            rule=rule,
            settings=settings[-1] if settings else {},
            sketches=_convert(by_recognition, Sketch.joined),
        )

    @property
    def trained(self) -> SplitRows:
        """The rows that a run trains on: the rows of `train` that are in no other split."""
        sketches = {
            recognition: {TRAIN: splits[TRAIN].without(s for n, s in splits.items() if n != TRAIN)}
            for recognition, splits in self.sketches.items()
            if TRAIN in splits
        }
        return replace(self, sketches=sketches)

    def and_then(self, later: SplitRows) -> SplitRows:
        """Returns the rows of both if their sketches can be joined, otherwise the later rows."""
        common = self.sketches.keys() & later.sketches.keys()
        if not common:
            return later
        return replace(
            later,
            jobs=tuple(dict.fromkeys((*self.jobs, *later.jobs))),
            sketches={
                recognition: {
                    TRAIN: Sketch.joined(
                        s[recognition].get(TRAIN, Sketch()) for s in (self.sketches, later.sketches)
                    )
                }
                for recognition in sorted(common)
            },
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "jobs": list(self.jobs),
            "rule": self.rule.to_json() if self.rule else None,
            "settings": dict(self.settings),
            "sketches": _convert(self.sketches, Sketch.to_json),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SplitRows:
        return cls(
            jobs=tuple(value["jobs"]),
            settings=value["settings"],
            rule=Identity.from_json(value["rule"]) if value["rule"] else None,
            sketches=_convert(value["sketches"], Sketch.from_json),
        )


def _convert(
    sketches: Mapping[str, Mapping[str, Any]], convert: Callable[[Any], Any]
) -> dict[str, dict[str, Any]]:
    """Converts the sketch of each split, by recognition."""
    return {
        recognition: {split: convert(sketch) for split, sketch in splits.items()}
        for recognition, splits in sketches.items()
    }


def under_rule(
    spec: Spec, parent: JobRecord | None, *, accept: bool
) -> tuple[Spec, Identity | None]:
    """Returns the spec with the rule of its rows, and the table's rule, if the spec has its columns.

    Both rules are the same, unless the spec begins a new rule. A spec begins a new rule in three
    cases: there is no table yet, the spec is the first with a key, or the user accepts that rows change their split.
    If the same times cut the splits as before, the rule goes on without the columns that the spec lacks."""
    rule = parent.identity if parent else None
    if parent is None or rule is None:
        return spec, None
    first_key = bool(spec.table.key) and not rule.named
    try:
        same_times = bool(spec.table.split_time) and _settings(parent) == _settings_of(spec)
        identity = rule.find_in(spec.table, spec.input, spec.types, may_lack=same_times)
    except SplitMoved:
        if not accept and not first_key:
            raise
        return spec, None
    if first_key and set(spec.table.key) != {c.name for c in identity.columns}:
        return spec, identity
    try:
        identity.check_table(spec.table)
    except SplitMoved:
        if not accept:
            raise
        return spec, identity
    return replace(spec, identity=identity), identity


@lru_cache(maxsize=16)
def _spec(text: str) -> Spec:
    """Parses a spec's text. The cache serves all jobs that append with it."""
    return Spec.parse(text)


def _settings(record: JobRecord) -> dict[str, Any]:
    return _settings_of(_spec(record.spec)) if record.spec else {}


def _settings_of(spec: Spec) -> dict[str, Any]:
    table = spec.table
    time_was = spec.input.was.get(table.split_time or "")
    return {
        "split": dict(table.split),
        "split_by": list(table.split_by),
        "split_column": table.split_column,
        "split_time": table.split_time,
        "split_from": list(table.split_from),
        **({"split_time_was": time_was} if time_was else {}),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The share of each of a version's splits that was trained on in another version."""

    shares: Mapping[str, float]
    exact: bool

    def of(self, split: str) -> Seen:
        return replace(
            self, shares={name: share for name, share in self.shares.items() if name == split}
        )

    @property
    def text(self) -> str:
        """A description for messages. Empty if nothing was trained on."""
        about = "" if self.exact else "about "
        return " and ".join(
            f"{about}{100 * share:.3g} % of the rows of split {split!r}"
            for split, share in self.shares.items()
            if share
        )


def trained_on(before: SplitRows, after: SplitRows) -> Seen:
    """Returns the share of each split of `after` that is among the rows trained on in `before`. Raises SplitMoved if it
    cannot be known."""
    if set(after.jobs) <= set(before.jobs):
        return Seen(shares={}, exact=True)  # the same files, each in the split that it was in
    shares: dict[str, float] = {}
    exact = True
    common = before.sketches.keys() & after.sketches.keys()
    for recognition in sorted(common):
        trained = before.sketches[recognition].get(TRAIN, Sketch())
        for split, sketch in after.sketches[recognition].items():
            if split != TRAIN:
                shares[split] = max(shares.get(split, 0.0), sketch.share_in(trained))
                exact &= sketch.is_complete and trained.is_complete
    if common or (
        before.rule is None and after.rule is None and not before.settings and not after.settings
    ):
        # Tables that no job made have neither rules nor settings.
        return Seen(shares=shares, exact=exact)
    same_times = before.settings == after.settings and after.settings.get("split_time")
    if (
        before.rule is None
        or after.rule is None
        or not (same_times or before.rule.is_same(after.rule))
    ):
        raise SplitMoved(
            "its rows are known by other columns than the rows that were trained on, so the two cannot be "
            f"compared ({_words(before.rule)}; now {_words(after.rule)})"
        )
    if before.settings != after.settings:
        raise SplitMoved("its splits are cut in another way, and no sketch shows which rows moved")
    return Seen(shares=shares, exact=exact)


def _words(rule: Identity | None) -> str:
    return "several rules" if rule is None else f"{rule.text}, by seed {rule.seed}"


def count_repeated_rows(
    before: SplitRows, appended: SplitRows, rows: int
) -> tuple[int, bool] | None:
    """Returns the number of an append's rows that a table already has, and whether it is exact.

    Returns None if the number cannot be known."""
    common = before.sketches.keys() & appended.sketches.keys()
    if not common:
        return None
    both = [Sketch.joined(side.sketches[min(common)].values()) for side in (appended, before)]
    return round(rows * both[0].share_in(both[1])), both[0].is_complete and both[1].is_complete
