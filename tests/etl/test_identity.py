"""By what rows are known: whatever column comes, goes or changes, no row of train becomes one of test."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.spec import row_split
from sluice.etl.spec.row_identity import Identity
from sluice.etl.spec.row_split import whole_rows
from sluice.etl.table.sketch import MOST, HashBounds, SketchSum, gather
from sluice.etl.table.split_rows import count_repeated_rows, trained_on
from tests.etl.tables import column, write_spec
from tests.product import (
    FileAssignment,
    JobRecord,
    Sketch,
    Spec,
    SpecError,
    SplitMoved,
    SplitRows,
    hash_of,
    row_keys,
    under_rule,
)
from tests.raises import assert_names, raises

ROWS = 20_000
COLUMNS = ("label:int", "id:int", "price:float", "user:text", "hour:int", "tags:texts")
HALVES = "split = {train = 0.7, test = 0.3}"


def text(*columns: str | tuple[str, str], table: str = "") -> str:
    """A spec; a pair is a column and what it was."""
    split = "" if "split =" in table else HALVES
    hour = column("hour", "dense", "fill")
    return write_spec(columns, hour, form="json", table=f"{split}\n{table}", label="label")


def noise(rows: int = ROWS, seed: int = 7) -> dict[str, pa.Array]:
    """Columns of which the labels know nothing."""
    drawn = np.random.default_rng(seed)
    return {
        "label": pa.array(drawn.integers(0, 2, rows)),
        "id": pa.array(np.arange(rows)),
        "price": pa.array(drawn.integers(0, 500, rows) / 4),
        "user": pa.array([f"u{n}" for n in drawn.integers(0, 999, rows)]),
        "hour": pa.array(drawn.integers(0, 5000, rows)),
        "tags": pa.array([[f"t{n % 3}"] for n in range(rows)]),
    }


def record(
    spec: Spec,
    columns: dict[str, pa.Array],
    *,
    version: int = 0,
    before: Identity | None = None,
    sketched: bool = True,
    job: str = "",
) -> JobRecord:
    """What a job of this spec leaves."""
    split = split_of(spec, columns)
    sketches = {
        rule.recognition: {
            name: Sketch.of(hash_of(columns, rule.recognised, rule.seed)[split == n]).to_json()
            for n, name in enumerate(spec.table.split)
        }
        for rule in (spec.rule, *([before] if before else []))
    }
    return JobRecord(
        job=job or f"job-{version}",
        mode="overwrite",
        version=version,
        at="",
        rows=len(split),
        state=None,
        parent=None,
        spec=spec.text,
        seed=spec.table.seed,
        cardinalities={},
        files=(),
        identity=spec.rule,
        sketches=sketches if sketched else {},
    )


def split_of(spec: Spec, columns: dict[str, pa.Array]) -> np.ndarray:
    return row_split.split_of(columns, row_keys(columns, spec), spec)


def now(
    columns: dict[str, pa.Array], *, rename: dict[str, str] | None = None, **changed: pa.Array
) -> dict[str, pa.Array]:
    """The same rows, as a later version has them."""
    renamed = {(rename or {}).get(name, name): values for name, values in columns.items()}
    return renamed | changed


FIRST, NOISE = text(*COLUMNS), noise()
MORE = pa.array(np.random.default_rng(1).random(ROWS))
AS_TEXT = NOISE["id"].cast(pa.string())
KEYED = 'key = ["id"]'

CASES = {
    "added": (FIRST, text(*COLUMNS, "more:float"), now(NOISE, more=MORE)),
    "reordered": (FIRST, text(*COLUMNS[::-1]), NOISE),
    "renamed": (
        FIRST,
        text(*COLUMNS[:3], ("visitor:text", "user"), *COLUMNS[4:]),
        now(NOISE, rename={"user": "visitor"}),
    ),
    "int to text": (
        FIRST,
        text("label:int", ("id:text", "id"), *COLUMNS[2:]),
        now(NOISE, id=AS_TEXT),
    ),
    "float to text, renamed": (
        FIRST,
        text(*COLUMNS[:2], ("cost:text", "price"), *COLUMNS[3:]),
        now(NOISE, cost=pa.array([f" {x}" for x in NOISE["price"].to_pylist()])),
    ),
    "dropped, with a key": (
        text(*COLUMNS, table=KEYED),
        text(*COLUMNS[:2], *COLUMNS[4:], table=KEYED),
        NOISE,
    ),
    "values changed, with a key": (
        text(*COLUMNS, table=KEYED),
        text(*COLUMNS),
        now(NOISE, price=MORE),
    ),
    "split_by, retyped": (
        text(*COLUMNS, table='key = "id"\nsplit_by = "hour"'),
        text(
            *COLUMNS[:4], ("hour:text", "hour"), "tags:texts", table='key = "id"\nsplit_by = "hour"'
        )
        .replace('ops = [{op = "fill"}]', "")
        .replace('role = "dense"', 'role = "key"')
        + column("id", "dense", "fill"),
        now(NOISE, hour=NOISE["hour"].cast(pa.string())),
    ),
}


BY_TIME = 'split = {train = 0, test = 3500}\nsplit_time = "hour"'


@pytest.mark.parametrize("names", [("user",), ("user", "price"), ("id", "price", "tags")])
@pytest.mark.parametrize("key", ["", 'key = ["id", "user"]'])
def test_a_column_that_does_not_decide_the_split_may_be_dropped(names, key):
    """The time decides it. The dropped columns are in the key all the same."""
    columns = noise(500)
    begun = Spec.parse(text(*COLUMNS, table=f"{BY_TIME}\n{key}"))
    parent = record(begun, columns)
    later = text(*(c for c in COLUMNS if c.split(":")[0] not in names), table=BY_TIME)
    spec, _ = under_rule(Spec.parse(later), parent, accept=False)
    assert not {c.name for c in spec.rule.columns} & set(names)
    assert np.array_equal(split_of(begun, columns), split_of(spec, columns))
    after = record(spec, columns, version=1)
    trained = SplitRows.of([parent]).trained
    assert trained_on(trained, SplitRows.of([after])).text == ""
    assert trained_on(trained, SplitRows.of([parent, after])).text == ""
    assert under_rule(Spec.parse(later), after, accept=False)[0].rule == spec.rule


@pytest.mark.parametrize(
    ("columns", "table"),
    [
        (COLUMNS, BY_TIME.replace("3500", "3000")),  # other times
        (COLUMNS, 'split = {train = 0, test = 3500}\nsplit_time = "id"'),
        (
            ("label:int", "id:int", ("hour:int", "price"), ("price:int", "hour"), "tags:texts"),
            BY_TIME,
        ),
        (COLUMNS, HALVES),
    ],
)
def test_a_column_that_is_dropped_while_the_splits_are_cut_anew_is_refused(columns, table):
    rows = noise(500)
    parent = record(Spec.parse(text(*COLUMNS, table=BY_TIME)), rows)
    later = Spec.parse(text(*(c for c in columns if c != "user:text"), table=table))
    with raises(SplitMoved, "'user'", "missing"):
        under_rule(later, parent, accept=False)
    accepted, _ = under_rule(later, parent, accept=True)
    if "id" not in table:
        after = SplitRows.of([record(accepted, rows, version=1)])
        with raises(SplitMoved, "cannot be compared"):
            trained_on(SplitRows.of([parent]).trained, after)


@pytest.mark.parametrize("case", CASES)
def test_nothing_that_changes_shows_test_rows_to_a_learner(case):
    first, later, columns = CASES[case]
    begun = Spec.parse(first)
    parent = record(begun, NOISE)
    spec, before = under_rule(Spec.parse(later), parent, accept=False)
    assert spec.rule == before
    splits = split_of(begun, NOISE), split_of(spec, columns)
    assert np.array_equal(*splits)
    assert np.array_equal(row_keys(columns, spec), row_keys(NOISE, begun))
    after = record(spec, columns, version=1)
    # The run that goes on sees the same.
    assert trained_on(SplitRows.of([parent]).trained, SplitRows.of([after])).text == ""
    # And the version after it, by the same spec file, which still says what was.
    assert under_rule(Spec.parse(later), after, accept=False)[0].rule.columns == spec.rule.columns


def test_without_the_rule_all_of_this_would_leak_and_the_share_is_named():
    """What accepting means: the test above can fail."""
    begun, parent = Spec.parse(FIRST), record(Spec.parse(FIRST), NOISE)
    spec, before = under_rule(Spec.parse(text(*COLUMNS, table="seed = 1")), parent, accept=True)
    splits = split_of(begun, NOISE), split_of(spec, NOISE)
    leak = trained_on(
        SplitRows.of([parent]).trained,
        SplitRows.of([record(spec, NOISE, version=1, before=before)]),
    )
    truth = float((splits[0][splits[1] == 1] == 0).mean())
    assert leak.shares["test"] == pytest.approx(truth, abs=0.05)
    assert not leak.exact
    assert_names(leak.text, "about", f"{100 * leak.shares['test']:.3g} %", "'test'")


REFUSED = [
    (
        text(*COLUMNS[:3], "visitor:text", *COLUMNS[4:]),
        ("'user'", "missing", 'was = "user"'),
    ),
    (text(*COLUMNS[:3], *COLUMNS[4:]), ("'user'", "missing")),
    (
        text("label:int", "id:text", *COLUMNS[2:]),
        ("'id'", "text", "int", 'was = "id"'),
    ),
    (
        text(*COLUMNS[:3], ("user:int", "user"), *COLUMNS[4:]),
        ("'user'", "int", "text"),
    ),
    (
        text(*COLUMNS, table="seed = 1"),
        ("table.seed = 1", "seed 0"),
    ),
    (
        text(*COLUMNS, table='split_by = "user"'),
        ("table.split_by", "user"),
    ),
]


@pytest.mark.parametrize(("later", "facts"), REFUSED)
def test_what_would_move_rows_is_refused_by_name_or_accepted(later, facts):
    parent = record(Spec.parse(FIRST), noise(50))
    with raises(SplitMoved, *facts) as refused:
        under_rule(Spec.parse(later), parent, accept=False)
    assert "--split-moved accept" in str(refused.value)
    spec, _ = under_rule(Spec.parse(later), parent, accept=True)
    assert spec.rule == Spec.parse(later).rule


def test_a_key_may_be_named_later_once_and_begins_a_rule():
    parent = record(Spec.parse(FIRST), noise(50))
    spec, before = under_rule(Spec.parse(text(*COLUMNS, table=KEYED)), parent, accept=False)
    assert (spec.rule.named, before) == (True, parent.identity)
    later = SplitRows.of([record(spec, noise(50), version=1, before=before)])
    leak = trained_on(SplitRows.of([parent]).trained, later)
    assert leak.exact
    assert_names(leak.text, "'test'")
    with raises(SplitMoved, "table.key", "user", "id"):
        under_rule(
            Spec.parse(text(*COLUMNS, table='key = "user"')), record(spec, noise(50)), accept=False
        )
    without = Spec.parse(text("label:int", "hour:int", "id:int", table=KEYED))
    spec, before = under_rule(without, parent, accept=False)
    assert before is None
    with raises(SplitMoved, "the key id"):
        trained_on(
            SplitRows.of([parent]).trained, SplitRows.of([record(spec, noise(50), version=1)])
        )


def test_rows_are_not_split_by_lists():
    with raises(SpecError, "table.split_by = 'tags'", "texts"):
        Spec.parse(text(*COLUMNS, table='split_by = "tags"'))


def test_rows_of_one_key_are_ordered_by_all_they_hold_whatever_the_columns_order():
    columns = noise(2000)
    spec = Spec.parse(text(*COLUMNS, table='key = "user"'))
    assert FileAssignment(spec, (1, 1)).has_ties
    assert not FileAssignment(Spec.parse(FIRST), (1, 1)).has_ties
    assert len(np.unique(row_keys(columns, spec))) < 1000
    whole = whole_rows(columns)
    assert len(np.unique(whole)) == 2000
    assert np.array_equal(whole, whole_rows(dict(reversed(columns.items()))))


def test_a_sketch_is_the_same_however_its_rows_were_spread():
    """Over tasks, some of which run twice, and over jobs; and it knows up to where it is whole."""
    hashes = np.random.default_rng(3).integers(0, 2**64, 50_000, np.uint64, endpoint=False)
    want = np.unique(hashes)
    whole = Sketch.of(hashes)
    assert np.array_equal(whole.hashes, want[:MOST])
    assert (whole.below, whole.is_complete) == (int(want[MOST]), False)
    bounds, adding = HashBounds.of(len(hashes), {"train": 1.0}), SketchSum()
    parts = [{("r", "train"): bounds.smallest("train", part)} for part in np.array_split(hashes, 9)]
    sent = sum(len(part["r", "train"]) for part in parts)
    assert MOST < sent < 3 * MOST  # of all tasks together
    total = adding.zero({})
    for part in [*parts, parts[4], *parts[::-1]]:
        adding.addInPlace(total, gather({}, part))
    spread = bounds.sketches(total)["r"]["train"]
    assert spread.to_json() == whole.to_json()
    assert (
        Sketch.joined([Sketch.of(part) for part in np.array_split(hashes, 3)]).to_json()
        == whole.to_json()
    )
    few = Sketch.of(hashes[:100])
    assert list(bounds.sketches({("t", "train"): want, ("r", "train"): want})) == ["r", "t"]
    assert few.is_complete
    assert few.share_in(Sketch.of(hashes[50:150])) == 0.5
    assert Sketch().share_in(few) == 0.0


@pytest.mark.parametrize(
    "broken",
    [{"below": "0"}, {"below": "zz"}, {"hashes": "?"}, {"hashes": "AAAA"}, {"hashes": None}],
)
def test_a_sketch_that_was_damaged_is_refused(broken):
    good = Sketch.of(np.arange(1, 9, dtype=np.uint64)).to_json()
    assert Sketch.from_json(good).hashes.tolist() == list(range(1, 9))
    with pytest.raises(ValueError, match=r"."):
        Sketch.from_json({**good, **broken})


def test_what_is_trained_on_over_several_versions_adds_up_and_what_always_lay_in_both_is_no_news():
    columns = noise(3000)
    by_time = [
        text(*COLUMNS, table=f'split_time = "hour"\nsplit = {{train = 0, test = {bound}}}')
        for bound in (4000, 2500)
    ]
    first, later = (Spec.parse(t) for t in by_time)
    then, after = (
        SplitRows.of([record(first, columns)]),
        SplitRows.of([record(later, columns, version=1)]),
    )
    hour = columns["hour"].to_numpy()
    share = float(((hour >= 2500) & (hour < 4000)).sum() / (hour >= 2500).sum())
    assert trained_on(then.trained, after).shares["test"] == pytest.approx(share, abs=0.02)
    assert trained_on(after.trained, then).text == ""  # train grows as time goes on
    other = SplitRows.of(
        [record(first, {n: v.slice(0, 10) for n, v in columns.items()}, version=2)]
    )
    assert (
        trained_on(other.trained.and_then(then.trained), after).shares
        == trained_on(then.trained, after).shares
    )
    assert (
        trained_on(then.trained.and_then(other.trained), after).shares
        == trained_on(then.trained, after).shares
    )


def test_splits_named_by_a_column_are_compared_by_the_others():
    columns = noise(1000)
    names = pa.array(["train", "test"] * 500)
    spec = Spec.parse(
        text(
            *COLUMNS, "part:text", table='split_column = "part"\nsplit = {train = 0.5, test = 0.5}'
        )
    )
    before = SplitRows.of([record(spec, {**columns, "part": names})])
    turned = SplitRows.of(
        [record(spec, {**columns, "part": pa.array(["test", "train"] * 500)}, version=1)]
    )
    assert trained_on(before.trained, turned).shares == {"test": 1.0}
    assert (
        trained_on(
            before.trained, SplitRows.of([record(spec, {**columns, "part": names}, version=1)])
        ).text
        == ""
    )


def test_the_same_files_never_move_and_versions_without_sketches_are_compared_by_their_rules():
    old = record(Spec.parse(FIRST), noise(50), sketched=False)
    more = now(noise(50), more=pa.array(range(50)))
    mixed = record(Spec.parse(text(*COLUMNS, "more:int")), more, version=1, sketched=False)
    both = SplitRows.of([old, mixed])
    assert both.rule is None
    assert trained_on(both, both).text == ""
    assert (
        trained_on(
            SplitRows.of([old]), SplitRows.of([dataclasses.replace(old, job="again", version=1)])
        ).text
        == ""
    )
    with raises(SplitMoved, "several rules"):
        trained_on(SplitRows.of([old]), both)
    recut = Spec.parse(text(*COLUMNS, table="split = {train = 0.5, test = 0.5}"))
    with raises(SplitMoved, "no sketch"):
        trained_on(
            SplitRows.of([old]), SplitRows.of([record(recut, noise(50), version=1, sketched=False)])
        )


def test_rows_that_are_appended_again_are_counted():
    columns, spec = noise(9000), Spec.parse(FIRST)
    part = {name: values.slice(0, 4000) for name, values in columns.items()}
    more = {name: values.slice(3000, 2000) for name, values in columns.items()}
    assert count_repeated_rows(*(SplitRows.of([record(spec, c)]) for c in (part, more)), 2000) == (
        1000,
        True,
    )
    table = SplitRows.of([record(spec, {n: v.slice(0, 8500) for n, v in columns.items()})])
    again, exact = count_repeated_rows(table, SplitRows.of([record(spec, columns)]), 9000)
    assert (again, exact) == (pytest.approx(8500, rel=0.02), False)
    assert count_repeated_rows(SplitRows.of([record(spec, part, sketched=False)]), table, 5) is None


def test_rows_of_one_key_at_other_times_are_no_repetition():
    columns, spec = noise(100), Spec.parse(text(*COLUMNS, table=f"{KEYED}\n{BY_TIME}"))
    later = now(columns, hour=pa.array([hour + 5000 for hour in columns["hour"].to_pylist()]))
    first, second = (SplitRows.of([record(spec, rows)]) for rows in (columns, later))
    assert count_repeated_rows(first, second, 100) == (0, True)
    assert count_repeated_rows(first, first, 100) == (100, True)
