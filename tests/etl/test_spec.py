"""Specs: what is read, and that every mistake is named by its path and its nearest right name."""

import pytest

from tests.etl.tables import column, section, write_spec
from tests.product import BY_WAY, Categorify, Fill, FittedState, Log, Spec, SpecError, cardinalities
from tests.raises import MISTAKES, raises

GOOD = """
[input]
columns = ["label:int", "I1..I3:int", "C1..C2:text"]
[table]
seed = 3
[[column]]
name = "label"
role = "label"
[[column]]
match = "I*"
role = "dense"
ops = [{op = "fill"}, {op = "log", shift = 3}]
[[column]]
match = "C*"
role = "sparse"
ops = [{op = "categorify", min_count = 2, oov = 4}]
embedding = {width = 8}
[[column]]
name = "C2"
role = "sparse"
ops = [{op = "hash", size = 10}]
"""


def test_a_spec_is_read_whole():
    spec = Spec.parse(GOOD)
    assert [c.name for c in spec.columns] == ["label", "I1", "I2", "I3", "C1", "C2"]
    assert spec.columns[1].ops == (Fill(), Log(shift=3.0))
    assert spec.columns[4].ops == (Categorify(min_count=2, oov=4),)
    assert spec.columns[4].width == 8
    assert spec.columns[5].ops[0].name == "hash"  # the exact name wins over the wildcard
    assert [learned.key for learned in spec.fitted] == ["C1/0"]
    assert spec.table.split == {"train": 0.8, "validation": 0.1, "test": 0.1}


def test_only_what_changes_the_fit_changes_its_hash():
    spec = Spec.parse(GOOD)
    assert Spec.parse(GOOD.replace("size = 10", "size = 11")).fitted_hash == spec.fitted_hash
    assert (
        Spec.parse(GOOD.replace("min_count = 2", "min_count = 3")).fitted_hash != spec.fitted_hash
    )


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    MISTAKES["spec"],
)
def test_a_mistake_is_named_by_its_path(old, new, facts):
    assert old in GOOD
    with raises(SpecError, *facts):
        Spec.parse(GOOD.replace(old, new), "my.toml")


@pytest.mark.parametrize(
    ("old", "new", "path"),
    MISTAKES["spec_of_0_2"],
)
def test_what_only_0_2_had_is_refused_by_name(old, new, path):
    with raises(SpecError, "my.toml", path, BY_WAY):
        Spec.parse(GOOD.replace(old, new, 1), "my.toml")


def test_joint_columns_share_a_state_and_must_agree():
    text = GOOD.replace(
        '{op = "categorify", min_count = 2, oov = 4}', '{op = "categorify", joint = "C"}'
    ).replace('{op = "hash", size = 10}', '{op = "categorify", joint = "C"}')
    (learned,) = Spec.parse(text).fitted
    assert (learned.key, [c.name for c, _ in learned.users]) == ("joint/C", ["C1", "C2"])
    with raises(SpecError, "joint = 'C'", "'C1'"):
        Spec.parse(text[::-1].replace('"C" = tnioj'[::1], '2 = voo ,"C" = tnioj', 1)[::-1])


def test_levels_are_the_operators_that_learn_one_after_the_other():
    text = GOOD.replace('{op = "log", shift = 3}', '{op = "fill_mean"}, {op = "standardise"}')
    spec = Spec.parse(text)
    assert spec.levels == 2
    assert {learned.key: learned.level for learned in spec.fitted}["I1/2"] == 1
    two, three = (", ".join(['{op = "standardise"}'] * times) for times in (2, 3))
    assert Spec.parse(text.replace('{op = "standardise"}', two)).levels == 3
    with raises(SpecError, "column[1].ops:", 3):
        Spec.parse(text.replace('{op = "standardise"}', three))


@pytest.mark.parametrize(
    ("ops", "rows"),
    [("hash, size = 9; hash, size = 5", 7), ("hash, size = 5; modulus, size = 9", 11)],
)
def test_a_column_of_ids_has_the_rows_of_its_last_ids(ops, rows):
    spec = Spec.parse(write_spec("label:int C1:text", column("x", "sparse", ops, "C1")))
    assert cardinalities(spec, FittedState()) == {"x": rows}


def test_each_column_of_one_hot_has_the_operators_before_it():
    ops = 'lower; replace, pattern = "x", to = "a"; one_hot, values = ["a"]'
    text = GOOD + column("kind", "dense", ops, "C1")
    (made,) = (c for c in Spec.parse(text).columns if c.name == "kind=a")
    assert [op.name for op in made.ops] == ["lower", "replace", "one_hot"]


def test_one_column_becomes_several():
    text = GOOD.replace(
        '{op = "fill"}, {op = "log", shift = 3}', '{op = "fill_median", indicator = true}'
    ) + column("kind", "dense", 'one_hot, values = ["a", "b"]', "C1")
    names = [c.name for c in Spec.parse(text).columns]
    assert names == [
        "label",
        "I1",
        "I1_missing",
        "I2",
        "I2_missing",
        "I3",
        "I3_missing",
        "C1",
        "C2",
        "kind=a",
        "kind=b",
    ]


@pytest.mark.parametrize(
    ("role", "sources", "before", "made"),
    [
        ("dense", '"C1"', '{op = "parse_time"}, ', ("parse_time", "missing")),
        ("dense", '["I1", "C1"]', '{op = "hour"}, ', ("hour", "missing")),
        ("sparse", '"I1"', '{op = "clip", low = 0}, ', ("clip", "missing")),
        ("dense", '"I1"', '{op = "standardise"}, ', ("missing",)),
    ],
)
def test_an_indicator_is_a_dense_column_of_what_the_fill_fills(role, sources, before, made):
    after = ', {op = "bucketize", boundaries = [1]}' if role == "sparse" else ""
    spec = Spec.parse(f'''{GOOD}
[[column]]
name = "x"
from = {sources}
role = "{role}"
ops = [{before}{{op = "fill", indicator = true}}{after}]
''')
    column = {c.name: c for c in spec.columns}["x_missing"]
    assert (column.role, tuple(op.name for op in column.ops)) == ("dense", made)


def test_minus_0_is_read_as_0_so_that_equal_operators_give_equal_bits():
    minus, plus = (
        Spec.parse(
            f'{GOOD}\n[[column]]\nname = "x"\nfrom = "I1"\nrole = "dense"\n'
            f'ops = [{{op = "clip", low = {value}}}, {{op = "fill", value = {value}}}]\n'
        )
        .columns[-1]
        .ops
        for value in ("-0.0", "0.0")
    )
    assert repr(minus) == repr(plus)


def test_what_is_left_to_the_loader_stands_in_the_field():
    text = GOOD.replace(
        "shift = 3}", 'shift = 3, online = true}, {op = "standardise", online = true}'
    )
    field = Spec.parse(text).fields({})[1]
    assert field.online == (
        {"op": "log", "shift": 3.0, "floor": 1e-6},
        {"op": "standardise", "state": "I1/2"},
    )


def test_ids_left_to_the_loader_are_stored_as_the_numbers_that_they_are_made_of():
    ids = '{op = "categorify", min_count = 2, oov = 4}'
    for chain, kind, ops in (
        ('{op = "modulus", size = 9, online = true}', "int64", ["modulus"]),
        ('{op = "modulus", size = 9}', "int32", []),
        ('{op = "bucketize", boundaries = [1], online = true}', "double", ["bucketize"]),
    ):
        text = GOOD.replace(ids, chain).replace(
            "C1..C2:text", "C1..C2:" + ("int" if kind == "double" else "text")
        )
        field = next(f for f in Spec.parse(text).fields({"C1": 11}) if f.name == "C1")
        assert (field.type, [step["op"] for step in field.online], field.cardinality) == (
            kind,
            ops,
            11,
        )


def test_a_missing_spec_is_named(tmp_path):
    with raises(SpecError, "nothing.toml:"):
        Spec.read(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("function", "inputs", "facts"),
    MISTAKES["function"],
)
def test_a_users_own_spec_says_at_once_what_is_wrong_with_its_functions(function, inputs, facts):
    text = GOOD.replace(
        '{op = "hash", size = 10}',
        f'''{{op = "python", function = "{function}", '''
        f'inputs = {inputs if inputs.startswith("[") else repr(inputs)}, output = "id", size = 9}}',
    )
    if not inputs.startswith("["):
        assert Spec.parse(text).functions == {function}  # which imports nothing
    with raises(SpecError, *facts):
        Spec.own(text, "my.toml")


def test_a_lag_sees_each_row_of_its_key_and_a_history_the_ones_that_it_names():
    lag = section("lag", name="a", of="x", by="x", order="x", rows=2)
    history = section("history", name="b", of="x", by="x", order="x", length=3, positive=True)
    text = write_spec("y:int x:int", lag, history, column("x", "dense", "fill"))
    rules = {rule.name: rule for rule in Spec.parse(text).rows.histories}
    assert [(r.lag, r.length, r.positive) for r in map(rules.get, "ab")] == [
        (2, 0, False),
        (0, 3, True),
    ]
