import dataclasses

import pytest

from tests.product import Field, Fingerprint

FIELDS = (
    Field(name="label", role="label", type="int8"),
    Field(name="I1", role="dense", type="float"),
    Field(name="C1", role="sparse", type="int32", cardinality=100),
    Field(name="L1", role="id_list", type="binary", layout="bytes", cardinality=9, bag=(0, 2.4, 7)),
)


def changed(name, **changes):
    return tuple(dataclasses.replace(f, **changes) if f.name == name else f for f in FIELDS)


def test_a_fingerprint_does_not_depend_on_the_order_of_columns():
    assert Fingerprint.of(FIELDS) == Fingerprint.of(reversed(FIELDS))


@pytest.mark.parametrize(
    ("fields", "layout", "vocabulary"),
    [
        (FIELDS[:-1], False, False),
        (changed("C1", cardinality=101), True, False),
        (changed("I1", online=({"op": "log"},)), False, True),
        (changed("L1", bag=(0, 2.4, 8)), False, True),
        (changed("L1", bag=(0, 2.3, 7)), True, True),
        (changed("C1", role="id_list"), False, True),
    ],
)
def test_each_fingerprint_sees_its_own_changes(fields, layout, vocabulary):
    """A few more rows move a mean bag length a little: that is no new layout."""
    before, after = Fingerprint.of(FIELDS), Fingerprint.of(fields)
    assert (before.layout == after.layout, before.vocabulary == after.vocabulary) == (
        layout,
        vocabulary,
    )
