"""[[transform]] and `--transform`: what may be written, what a model then sees, and what each built-in answers."""

import pyarrow as pa
import pytest

from sluice.etl.spec.table_transform import stored
from tests.etl.tables import column, write_spec
from tests.product import (
    Field,
    Fingerprint,
    Hash,
    Spec,
    SpecError,
    hash_texts,
    short_transforms,
    step,
    transformed,
)
from tests.raises import MISTAKES, raises

HEAD = write_spec(
    "label:int I1:int I2:int C1:text C2:text tags:texts",
    column("I*", "dense", "fill"),
    column("C*", "sparse", "categorify"),
    column("tags", "id_list", "categorify"),
    form="json",
    table="",
)
FIELDS = (
    Field(name="label", role="label", type="int8"),
    Field(name="I1", role="dense", type="float"),
    Field(name="I2", role="dense", type="float"),
    Field(name="C1", role="sparse", type="int32", cardinality=10),
    Field(name="C2", role="sparse", type="int32", cardinality=20),
    Field(
        name="tags", role="id_list", type="binary", layout="bytes", cardinality=30, bag=(0, 2.0, 5)
    ),
)


def entry(text: str) -> str:
    return f'{HEAD}\n[[transform]]\nname = "t"\n{text}\n'


def seen(text: str) -> dict[str, Field]:
    return {f.name: f for f in transformed(FIELDS, Spec.parse(entry(text)).transforms)}


# ---- known answers


def test_hash_of_ids_and_bags_is_the_hash_of_their_texts():
    op = Hash(size=1000, salt=3)
    want = [int(h % 1000) + 2 for h in hash_texts(pa.array(["7", "12", "7"]), 3)]
    assert step(op, pa.array([7, 12, 7], pa.int32()), None, {}).to_pylist() == want
    bags = pa.array([[7, 12], [], [7]], pa.list_(pa.int32()))
    assert step(op, bags, None, {}).to_pylist() == [want[:2], [], [want[2]]]


# ---- what a model sees


def test_a_function_may_change_columns_and_add_dense_and_sparse_ones():
    fields = seen(
        'function = "mine:f"\ninputs = ["I1", "C1"]\n'
        'outputs = ["I1", {name = "ratio", role = "dense"}, {name = "x", role = "sparse", cardinality = 7}, '
        '{name = "C1", cardinality = 4}, {name = "b", role = "id_list", cardinality = 3}]'
    )
    assert [f.name for f in FIELDS] + ["ratio", "x", "b"] == list(fields)
    assert [
        (f.role, f.cardinality, f.made) for f in (fields["ratio"], fields["x"], fields["b"])
    ] == [
        ("dense", None, True),
        ("sparse", 7, True),
        ("id_list", 3, True),
    ]
    assert (fields["C1"].cardinality, fields["C1"].stored_ids, fields["C1"].made) == (4, 10, False)
    assert fields["I1"].transforms == ("t",)
    assert fields["I2"] == FIELDS[2]
    assert stored(fields.values()) == FIELDS
    assert Fingerprint.of(FIELDS).layout != Fingerprint.of(fields.values()).layout


@pytest.mark.parametrize(
    ("text", "name", "role", "cardinality"),
    [
        ('op = "hash"\nsize = 100\ninputs = ["C1"]', "C1", "sparse", 102),
        ('op = "hash"\nsize = 100\ninputs = "tags"\noutputs = ["h"]', "h", "id_list", 102),
        ('op = "hash"\nsize = 100\ninputs = ["I1"]\noutputs = ["h"]', "h", "sparse", 102),
        ('op = "first_x"\nsize = 2\ninputs = ["tags"]', "tags", "id_list", 30),
        (
            'ops = [{op = "ngram", size = 2}, {op = "hash", size = 50}]\ninputs = ["tags"]\noutputs = ["g"]',
            "g",
            "id_list",
            52,
        ),
        (
            'op = "cross"\nsize = 1000\ninputs = ["C1", "C2"]\noutputs = ["C1xC2"]',
            "C1xC2",
            "sparse",
            1002,
        ),
        ('op = "log"\ninputs = ["I1"]', "I1", "dense", None),
        ('op = "bag"\nof = "mean"\ninputs = ["tags"]\noutputs = ["m"]', "m", "dense", None),
    ],
)
def test_built_in_operators_say_themselves_what_they_give(text, name, role, cardinality):
    field = seen(text)[name]
    assert (field.role, field.cardinality) == (role, cardinality)


def test_a_short_form_names_a_function_its_inputs_and_its_outputs():
    first, two, three = short_transforms(["mine.f:a", "mine:b:I1,C1>I1,r,x=9", "other:a:>n"])
    assert (first.name, first.function, first.inputs, first.outputs) == ("a", "mine.f:a", (), ())
    assert (three.name, three.inputs) == ("a_2", ())
    assert (two.inputs, [(o.name, o.cardinality) for o in two.outputs]) == (
        ("I1", "C1"),
        [("I1", None), ("r", None), ("x", 9)],
    )
    fields = {f.name: f for f in transformed(FIELDS, (two,))}
    assert (fields["r"].role, fields["x"].role, fields["x"].cardinality) == ("dense", "sparse", 9)
    for wrong in ("mine", "mine:b:I1", "mine:b:I1>x=few", ":f", "../m:f", "mine:b:I1>=3"):
        with raises(SpecError, "--transform"):
            short_transforms([wrong])


def test_a_short_form_may_limit_the_seconds_of_a_batch():
    first, two = short_transforms(["mine:a@2.5s", "mine:b:I1>x=9@10s"])
    assert (first.function, first.limit_s) == ("mine:a", 2.5)
    assert (two.outputs[0].cardinality, two.limit_s) == (9, 10)
    with raises(SpecError, "'mine:a@0s'", "above 0"):
        short_transforms(["mine:a@0s"])


def test_a_short_form_may_say_that_rows_are_computed_one_by_one():
    plain, pure, both, also = short_transforms(
        ["m:a", "m:b@pure", "m:c:I1>x=9@pure@10s", "m:d@1.5s@pure"]
    )
    assert [t.pure for t in (plain, pure, both, also)] == [False, True, True, True]
    assert [t.limit_s for t in (plain, pure, both, also)] == [None, None, 10, 1.5]
    assert [output.name for output in both.outputs] == ["x"]
    for wrong in ("m:a@impure", "m:a@pure:I1>I1", "m:a@"):
        with raises(SpecError, "--transform"):
            short_transforms([wrong])


def test_a_function_may_have_a_limit_and_be_pure_and_operators_may_not():
    of_i1 = 'inputs = ["I1"]\noutputs = ["I1"]\n'
    limited = Spec.parse(entry(f'{of_i1}function = "mine:f"\nlimit_s = 3.0'))
    assert limited.transforms[0].limit_s == 3
    assert Spec.parse(entry(f'{of_i1}function = "mine:f"\npure = true')).transforms[0].pure
    for wrong, facts in (
        ('function = "mine:f"\nlimit_s = -1.0', ("limit_s", "-1")),
        ('ops = [{op = "log1p"}]\nlimit_s = 3.0', ("limit_s", "function")),
        ('ops = [{op = "log1p"}]\npure = true', ("pure", "function")),
    ):
        with raises(SpecError, *facts):
            Spec.parse(entry(f"{of_i1}{wrong}"))


# ---- what is refused


@pytest.mark.parametrize(
    ("text", "facts"),
    MISTAKES["transform"],
)
def test_what_cannot_be_is_refused_when_the_spec_is_read(text, facts):
    with raises(SpecError, *facts):
        Spec.parse(entry(text))


def test_two_transforms_of_one_name_are_refused():
    with raises(SpecError, "transform[1].name = 't'", "another transform"):
        Spec.parse(entry('function = "m:f"') + '[[transform]]\nname = "t"\nfunction = "m:g"\n')


def test_reading_a_spec_imports_nothing():
    spec = Spec.parse(entry('function = "nowhere_to_be_found:f"'))
    assert spec.functions == {"nowhere_to_be_found:f"}
    assert spec.import_functions() == {}
