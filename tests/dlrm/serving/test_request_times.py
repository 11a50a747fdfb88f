"""A request may write a time as the input has it, or as seconds since 1970."""

import pytest

from tests.dlrm.serving import stub
from tests.dlrm.serving.stub import body_of
from tests.product import Decoder, Refusal, Spec
from tests.raises import raises

SPEC = """
[input]
format = "csv"
columns = ["y:int", {name = "at:float", format = ["%Y-%m-%d %H:%M:%S", "%d.%m.%Y"]},
           {name = "day:int", format = "%Y%m%d"}]
[[column]]
name = "y"
role = "label"
[[column]]
name = "at"
role = "sparse"
ops = [{op = "hour"}, {op = "modulus", size = 24}]
[[column]]
name = "day"
role = "sparse"
ops = [{op = "weekday"}, {op = "modulus", size = 7}]
"""
ROWS = [
    {"at": "1970-01-01 00:00:10", "day": "19700102"},
    {"at": "02.01.1970", "day": 5},
    {"at": 7.5, "day": None},
    {"at": "", "day": ""},
]
READ = {"at": [10.0, 86_400.0, 7.5, None], "day": [86_400, 5, None, None]}


def decoded(*bodies: bytes) -> dict[str, list]:
    columns = stub.decoded(Decoder(Spec.own(SPEC), "", most_rows=9), *bodies)
    return {name: values.to_pylist() for name, values in columns.items()}


def test_times_are_read_as_the_job_reads_them():
    assert decoded(body_of(*ROWS)) == READ
    assert decoded(*map(body_of, ROWS)) == READ, "requests that are answered together"


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"at": "yesterday"}, ["rows[1]", "'at'", "'yesterday'", "'%d.%m.%Y'"]),
        ({"day": "2026-03-03"}, ["rows[1]", "'day'", "'2026-03-03'", "'%Y%m%d'"]),
        ({"at": "\ud800"}, ["'at'", "not a number"]),
        ({"at": ["1970"]}, ["'at'", "not a number"]),
    ],
)
def test_a_text_that_is_no_such_time_is_refused_by_name(row, facts):
    with raises(Refusal, *facts) as refused:
        decoded(body_of({}, row))
    assert refused.value.status == 422
