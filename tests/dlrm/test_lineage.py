"""Two versions of a spec: for which columns an equal value means the same, down to the input."""

import pytest

from sluice.dlrm.follow.table_diff import explain_difference
from tests.product import Spec

INPUT = """
[input]
format = "csv"
columns = ["label:int", {a}, "b:text", "user:text", "day:int", {time}]
{more}
[table]
order = "day"
[[column]]
name = "label"
role = "label"
"""
COLUMN = """
[[column]]
name = "x"
from = "{source}"
role = "sparse"
ops = [{ops}]
"""
HISTORY = """
[[history]]
name = "past"
of = "{of}"
by = "{by}"
order = "{order}"
length = {length}
"""
LAG = """
[[lag]]
name = "last"
of = "{of}"
by = "{by}"
order = "day"
rows = {rows}
"""
JOIN = """
[[join]]
path = "{path}"
on = ["{on}"]
columns = ["city:{kind}"]
format = "csv"
{more}
"""
HASH = '{op = "hash", size = 100}'


def read_spec(
    source: str = "a",
    *,
    a: str = '"a:text"',
    time: str = '"t:int"',
    rows: str = "",
    ops: str = HASH,
    more: str = "",
) -> Spec:
    text = INPUT.format(a=a, time=time, more=more) + rows
    return Spec.parse(text + COLUMN.format(source=source, ops=ops))


def history(of="a", by="user", order="day", length=5, more="") -> Spec:
    rows = HISTORY.format(of=of, by=by, order=order, length=length) + more
    text = INPUT.format(a='"a:text"', time='"t:int"', more="") + rows
    column = COLUMN.format(source="past", ops=HASH).replace('"sparse"', '"id_list"')
    return Spec.parse(text + column)


def lag(of="a", by="user", rows=1) -> Spec:
    return read_spec("last", rows=LAG.format(of=of, by=by, rows=rows))


def join(path="cities", on="user", kind="text", more="") -> Spec:
    return read_spec("city", rows=JOIN.format(path=path, on=on, kind=kind, more=more))


def at(format_: str, zone: str) -> Spec:
    kind = f'{{name = "t:int", format = "{format_}", zone = "{zone}"}}'
    return read_spec("t", time=kind)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (read_spec(), read_spec("b")),
        (read_spec(), read_spec(ops='{op = "hash", size = 101}')),
        (read_spec(), read_spec(a='"a:int"')),
        (read_spec("day"), read_spec("day", more='thousands = "."\ndecimal = ","')),
        (at("%Y-%m-%d", "UTC"), at("%Y-%d-%m", "UTC")),
        (at("%Y-%m-%d", "UTC"), at("%Y-%m-%d", "Europe/Paris")),
        (history(), history(of="b")),
        (history(), history(by="b")),
        (history(), history(order="t")),
        (history(), history(more="positive = true\n")),
        (lag(), lag(of="b")),
        (lag(), lag(by="b")),
        (lag(), lag(rows=2)),
        (join(), join(path="towns")),
        (join(), join(on="a")),
        (join(), join(kind="int")),
        (join(), join(more='their_on = "id"')),
        (join(), join(more='decimal = ","')),
    ],
)
def test_a_column_of_other_values_is_named(before, after):
    assert explain_difference(before, after, "x")
    assert explain_difference(after, before, "x")
    assert not explain_difference(before, before, "x")
    assert not explain_difference(after, after, "x")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (history(), history(length=9)),
        (read_spec(), read_spec(more='null_values = ["-"]')),
        (read_spec(), read_spec("new", a='{name = "new:text", was = "a"}')),
    ],
)
def test_a_column_of_the_same_values_keeps_its_ids(before, after):
    assert not explain_difference(before, after, "x")


def test_names_that_two_columns_exchange_are_followed_to_the_value():
    before = read_spec("c", a='"c:text", "d:text"')
    exchanged = '{name = "c:text", was = "d"}, {name = "d:text", was = "c"}'
    assert explain_difference(before, read_spec("c", a=exchanged), "x")
    assert not explain_difference(before, read_spec("d", a=exchanged), "x")
