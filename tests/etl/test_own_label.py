"""No feature of a row depends on its own label: whole jobs against a small program of its own, and with labels
flipped."""

import dataclasses
import json
import struct
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sluice import FeatureTable
from sluice.etl.spec.row_split import ties
from tests.etl.jobs import build_table, job_of, rows_of
from tests.etl.slow_hashes import key_of, mixed
from tests.etl.tables import column, write_rows, write_spec
from tests.product import Spec, SpecError, StateError, TableError
from tests.raises import raises

COLUMNS = ("click:int", "user:text", "day:int", "row:int")
HASH = "split = {train = 0.8, test = 0.2}"
TIME = 'split_time = "day"\nsplit = {train = 0, test = 8}'
RATE = column("rate", "dense", "target, smoothing = 2%s", "user")


def spec(
    *columns: str | tuple[str, str], table: str = HASH, rate: str = RATE % "", more: str = ""
) -> str:
    """A spec whose table has the label, a number by which a row is found again, and target encodings. A pair is a
    column and what it was."""
    return write_spec(columns, column("row", "time"), rate, more, table=table, label="click")


def drawn(rows: int, seed: int = 0) -> list[dict]:
    """Rows of which many agree in all but the label, as no program draws them that wants to be lucky."""
    draw = np.random.default_rng(seed)
    return [
        {
            "click": int(draw.integers(2)),
            "user": None if draw.random() < 0.1 else f"u{draw.integers(40)}",
            "day": int(draw.integers(10)),
            "row": number // 3,
        }
        for number in range(rows)
    ]


KINDS = {"click": pa.int64(), "user": pa.string(), "day": pa.int64(), "row": pa.int64()}


def make(
    folder: Path,
    rows: list[dict],
    text: str,
    kinds: dict[str, pa.DataType] = KINDS,
    name: str = "t",
    **options: object,
) -> FeatureTable:
    """A version of the folder's table, of these rows."""
    path = write_rows(folder / f"{name}.parquet", rows, kinds)
    return build_table(None, folder / name, path, text=text, **options)


# A program of its own for keys, splits, folds and encodings: whole numbers and dicts.


@dataclasses.dataclass
class Twin:
    """What a version must hold. `key` names the columns of its rule, under the names that `rows` have."""

    key: tuple[str, ...]
    by_time: bool = False
    seed: int = 0
    folds: int = 5
    smoothing: float = 2.0

    def in_train(self, row: dict) -> bool:
        if self.by_time:
            return row["day"] < 8
        return (mixed(key_of(row, self.key, self.seed) ^ 0x5EED5EED00000001) >> 11) * 2.0**-53 < 0.8

    def fold(self, row: dict) -> int:
        return mixed(key_of(row, self.key, self.seed) ^ 0xF01DF01D00000001) % self.folds

    def features(self, rows: list[dict], learned: list[dict]) -> list[tuple[int, int, float]]:
        """(row, click, rate) of each row, from the training rows among those that were `learned`."""
        clicks: dict[tuple, int] = defaultdict(int)
        counts: dict[tuple, int] = defaultdict(int)
        for row in filter(self.in_train, learned):
            for cell in (
                (row["user"], self.fold(row)),
                (row["user"], "all"),
                ("all", self.fold(row)),
                ("all", "all"),
            ):
                clicks[cell] += row["click"]
                counts[cell] += 1
        made = []
        for row in rows:
            fold = self.fold(row) if self.in_train(row) else None
            known = [
                [
                    sums[value, "all"] - (sums[value, fold] if fold is not None else 0)
                    for sums in (clicks, counts)
                ]
                for value in ("all", row["user"])
            ]
            prior = known[0][0] / max(known[0][1], 1)
            rate = (known[1][0] + self.smoothing * prior) / (known[1][1] + self.smoothing)
            made.append((row["row"], row["click"], struct.unpack("f", struct.pack("f", rate))[0]))
        return sorted(made)


def holds(table: FeatureTable) -> list[tuple[int, int, float]]:
    return sorted((int(row["row"]), row["click"], row["rate"]) for row in rows_of(table))


BEGUN = Twin(("user", "day", "row"))
ID = 'key = "row"\n'
LATER = {
    "nothing": (spec(*COLUMNS), BEGUN, {}),
    "the label renamed": (
        spec(("bought:int", "click"), *COLUMNS[1:]).replace(
            'name = "click"\nrole', 'name = "click"\nfrom = "bought"\nrole'
        ),
        BEGUN,
        {},
    ),
    "other folds": (
        spec(*COLUMNS, rate=RATE % ", folds = 3"),
        dataclasses.replace(BEGUN, folds=3),
        {},
    ),
    "a key named": (spec(*COLUMNS, table=ID + HASH), Twin(("row",)), {}),
    "another seed": (
        spec(*COLUMNS, table="seed = 5\n" + HASH),
        dataclasses.replace(BEGUN, seed=5),
        {"split_moved": "accept"},
    ),
}


def changed(rows: list[dict], text: str) -> list[dict]:
    """The rows with the names and types that a spec wants."""
    wanted = Spec.parse(text).input
    made = []
    for number, row in enumerate(rows):
        cells = {**row, "more": number % 4, **{new: row[old] for new, old in wanted.was.items()}}
        made.append(
            {
                name: str(cells[name])
                if kind == "text" and cells[name] is not None
                else cells[name]
                for name, kind in wanted.columns.items()
            }
        )
    return made


@pytest.mark.parametrize("options", [{}, {"update_state": True}], ids=["overwritten", "updated"])
@pytest.mark.parametrize("case", LATER)
def test_after_every_change_rows_are_encoded_from_other_rows_alone(tmp_path, case, options):
    """The later version has the rows of the first, some with their labels corrected, and new ones."""
    text, twin, accepted = LATER[case]
    rows, more = drawn(600), drawn(150, 1)
    assert holds(make(tmp_path, rows, spec(*COLUMNS))) == BEGUN.features(rows, rows)
    later = [
        {**row, "click": row["click"] ^ (number % 7 == 0)} for number, row in enumerate(rows)
    ] + more
    options = {**options, **accepted, "mode": "overwrite"}
    table = make(tmp_path, changed(later, text), text, **options)
    assert holds(table) == twin.features(later, later)


@pytest.mark.parametrize("key", ["", 'key = ["row", "click"]\n'])
def test_of_rows_of_one_moment_a_label_decides_only_between_those_that_agree_in_all_else(key):
    """Also in a table of an older version, whose key may have the label."""
    made = Spec.parse(spec(*COLUMNS, table=key + HASH))
    rows = {name: pa.array([row[name] for row in drawn(50)], kind) for name, kind in KINDS.items()}
    flipped = {**rows, "click": pa.compute.subtract(1, rows["click"])}
    same = [
        np.array_equal(*both) for both in zip(ties(rows, made), ties(flipped, made), strict=True)
    ]
    assert same == [True, True, False]


@pytest.mark.parametrize("case", ["key named", "key named before"])
def test_a_key_that_is_named_moves_no_row_to_its_own_labels_sums_where_splits_go_by_time(
    tmp_path, case
):
    """Rows stay in their splits, so nothing is refused: their folds are what changes."""
    rows = drawn(900)
    first, later = spec(*COLUMNS, table=TIME), spec(*COLUMNS, table=ID + TIME)
    before = Twin(("user", "day", "row"), by_time=True)
    if case == "key named before":
        first, before = later, Twin(("row",), by_time=True)
    assert holds(make(tmp_path, rows, first)) == before.features(rows, rows)
    table = make(tmp_path, rows, later, mode="overwrite", update_state=True)
    assert holds(table) == Twin(("row",), by_time=True).features(rows, rows)
    if case == "key named":
        return
    for mode, options in (
        ("append", {}),
        ("append", {"update_state": True}),
        ("overwrite", {"reuse_state": True}),
    ):
        job = job_of(tmp_path / "t", "x", text=later, mode=mode, **options)
        assert job.before.tables


@pytest.mark.parametrize("options", [{}, {"update_state": True}], ids=["", "updated"])
def test_a_row_that_is_appended_again_does_not_meet_its_label_in_the_older_sums(tmp_path, options):
    """Also where its label was corrected meanwhile."""
    rows, text = drawn(600), spec(*COLUMNS)
    again = [
        {**row, "click": row["click"] ^ (number % 3 == 0)} for number, row in enumerate(rows[:200])
    ] + drawn(50, 2)
    make(tmp_path, rows, text)
    want = BEGUN.features(rows, rows) + BEGUN.features(again, rows)
    assert holds(make(tmp_path, again, text, mode="append", **options)) == sorted(want)


KEPT = [
    ("append", {}, spec(*COLUMNS, table=ID + TIME), ("other columns",)),
    (
        "append",
        {"update_state": True},
        spec(*COLUMNS, table=ID + TIME),
        ("other columns",),
    ),
    (
        "overwrite",
        {"reuse_state": True},
        spec(*COLUMNS, table=ID + TIME),
        ("other columns",),
    ),
    (
        "append",
        {"split_moved": "accept"},
        spec(*COLUMNS, table="seed = 1\n" + TIME),
        ("other columns",),
    ),
    (
        "append",
        {},
        spec(*COLUMNS, "buy:int", table=TIME).replace(
            'name = "click"', 'name = "click"\nfrom = "buy"'
        ),
        ("'click'", "'buy'"),
    ),
]


@pytest.mark.parametrize(("mode", "options", "later", "why"), KEPT)
def test_sums_of_labels_are_kept_only_while_rows_lie_in_the_same_folds(
    tmp_path, mode, options, later, why
):
    make(tmp_path, drawn(100), spec(*COLUMNS, table=TIME))
    command = f"sluice etl --spec spec --output {tmp_path / 't'} --mode overwrite --update-state"
    with raises(StateError, "version 0", "labels", *why, command):
        make(tmp_path, drawn(100), later, mode=mode, **options)


def test_rows_whose_labels_were_learned_never_become_test_rows_of_that_state(tmp_path):
    """Not even where the user accepts that rows change their split."""
    table = 'key = "row"\nsplit_column = "part"\nsplit = {train = 0.5, test = 0.5}'
    text, rows = spec(*COLUMNS, "part:text", table=table), drawn(200)
    for row in rows:
        row["part"] = ("train", "test")[row["row"] % 2]
    make(tmp_path, rows, text)
    turned = [{**row, "part": ("test", "train")[row["row"] % 2]} for row in rows]
    accepted = {"split_moved": "accept"}
    for mode, options in (("append", {}), ("overwrite", {"reuse_state": True})):
        with raises(StateError, "100 %", "'test'", "'train'", "labels"):
            make(tmp_path, turned, text, mode=mode, **accepted, **options)
    table = make(tmp_path, turned, text, mode="overwrite", update_state=True, **accepted)
    assert table.version == 1


@pytest.mark.parametrize("rules", [None, 1])
def test_a_table_by_other_rules_is_refused_when_it_is_opened(tmp_path, rules):
    make(tmp_path, drawn(400), spec(*COLUMNS))
    (record,) = (tmp_path / "t" / "_sluice" / "jobs").glob("*.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "rules": rules}))
    with raises(TableError, f"{record.name}:", "format 1", f"rules {rules}"):
        FeatureTable.open(tmp_path / "t")
    for mode, options in (("append", {}), ("overwrite", {"update_state": True})):
        with raises(TableError, record.name, "another version of sluice"):
            make(tmp_path, drawn(400), spec(*COLUMNS), mode=mode, **options)


@pytest.mark.parametrize(
    ("ops", "refused"),
    [
        ("concat; count; fill", True),
        ("concat; target", False),
    ],
)
def test_what_is_drawn_is_not_known_by_what_never_occurred(ops, refused):
    text = spec(
        *COLUMNS,
        "item:text",
        table=TIME,
        more='[negatives]\ncolumn = "item"\n' + column("pair", "dense", ops, ["user", "item"]),
    )
    assert Spec.parse(text).columns
    if not refused:
        assert Spec.own(text).columns
        return
    with raises(SpecError, "'pair'", "'item'", "[negatives]"):
        Spec.own(text)


def test_what_is_drawn_for_a_click_does_not_meet_that_click(tmp_path):
    """A user's only click lay in another fold than what was drawn for it, so that one alone had it in its rate."""
    rows = [
        {
            "click": int(number % 3 == 0),
            "user": f"u{number}",
            "day": number % 10,
            "row": number,
            "item": f"i{number % 7}",
        }
        for number in range(300)
    ]
    text = spec(*COLUMNS, "item:text", more='[negatives]\ncolumn = "item"\neach = 2\n')
    rates = defaultdict(set)
    for row in rows_of(make(tmp_path, rows, text), "train"):
        rates[row["row"]].add(row["rate"])
    assert {number for number, values in rates.items() if len(values) > 1} == set()
    assert len(rates) > 200


LABELS_USED = [
    (
        column("shown", "dense", "fill", "click"),
        "column 'shown'",
    ),
    (
        column("pairs", "dense", "concat; count; fill", ["user", "click"]),
        "column 'pairs'",
    ),
    ('[dedup]\nby = ["user"]\norder = "click"\n', "dedup.order"),
    ('[[join]]\npath = "x"\non = ["user", "click"]\ncolumns = ["age:int"]\n', "join.on"),
    (
        '[[join]]\npath = "x"\non = "user"\ntime = "click"\ntheir_time = "at"\ncolumns = ["age:int"]\n',
        "join.time",
    ),
    (
        '[[history]]\nname = "h"\nof = "day"\nby = "click"\norder = "day"\nlength = 2\n',
        "history.by",
    ),
    (
        '[[history]]\nname = "h"\nof = "day"\nby = "user"\norder = "click"\nlength = 2\n',
        "history.order",
    ),
    ('[[lag]]\nname = "h"\nof = "day"\nby = "user"\norder = "click"\n', "lag.order"),
    (
        '[[lag]]\nname = "h"\nof = "click"\nby = "user"\norder = "day"\ndifference = true\n',
        "lag.difference",
    ),
]


@pytest.mark.parametrize(
    ("more", "where"),
    [
        *LABELS_USED,
        *(
            (f"[table]\n{key} = {value}\n", f"table.{key}")
            for key, value in (
                ("key", '["row", "click"]'),
                ("split_by", '"click"'),
                ("order", '"click"'),
                ("together", '"click"'),
            )
        ),
    ],
)
def test_a_spec_that_shows_a_row_its_own_label_is_refused_but_read_out_of_a_table(more, where):
    text = (
        spec(*COLUMNS, more=more)
        if "[table]" not in more
        else spec(*COLUMNS).replace("[table]\n", more)
    )
    with raises(SpecError, "spec:", where, "'click'", "[[history]]"):
        Spec.own(text)
    assert Spec.parse(text).columns
    earlier = '[[history]]\nname = "h"\nof = "click"\nby = "user"\norder = "day"\nlength = 2\n'
    own = Spec.own(spec(*COLUMNS, table=TIME, more=earlier))
    assert own.learned_from_labels == {"rate/0"}
