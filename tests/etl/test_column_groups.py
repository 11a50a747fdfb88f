"""A server's features of several columns together: the same values as column by column, and the same errors."""

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.ops.chain import FeatureError
from tests.product import Features, FittedState, Spec
from tests.raises import raises

TEXT = """
[input]
format = "json"
columns = ["label:int", "I1..I3:int", "F1..F2:float", "C1..C4:text", "H1..H2:text"]
[table]
split = {train = 1}
[[column]]
name = "label"
role = "label"
[[column]]
match = "[IF]*"
role = "dense"
ops = [{op = "fill", value = 0}, {op = "clip", low = -2}, {op = "log", shift = 3}]
[[column]]
match = "C*"
role = "sparse"
ops = [{op = "categorify", min_count = 1, oov = 8}]
[[column]]
match = "H*"
role = "sparse"
ops = [{op = "hash", size = 1000}]
[[column]]
name = "S1"
from = ["C1"]
role = "id_list"
ops = [{op = "split", separator = "c"}, {op = "categorify", oov = 8}]
[[column]]
name = "S2"
from = ["C2"]
role = "id_list"
ops = [{op = "split", separator = "c"}, {op = "categorify", oov = 8}]
[[column]]
name = "hour of a zone"
from = ["I1", "H1"]
role = "dense"
ops = [{op = "hour"}, {op = "fill", value = 0.0}]
[[column]]
name = "hour"
from = ["I1"]
role = "dense"
ops = [{op = "hour"}, {op = "fill", value = 0.0}]
"""


@pytest.fixture
def columns() -> dict[str, pa.Array]:
    generator = np.random.default_rng(40)
    rows = 50

    def drawn(values: list[object], kind: pa.DataType) -> pa.Array:
        return pa.array([values[n] for n in generator.integers(len(values), size=rows)], kind)

    words = ["a", "bb", "", None, "ccccccccc", "\u00e9\u00e9\u00e9", "unseen"]
    return {
        **{f"I{n}": drawn([-3, -2, 0, 7, None, 2**40], pa.int64()) for n in (1, 2, 3)},
        **{f"F{n}": drawn([-1.5, 0.1, None, 1e300], pa.float64()) for n in (1, 2)},
        **{f"{kind}{n}": drawn(words, pa.string()) for kind in "CH" for n in (1, 2, 3, 4)},
    }


@pytest.fixture
def features() -> Features:
    spec = Spec.parse(TEXT)
    words = (["a", "bb"], ["bb", "a", "ccccccccc"], [], ["\u00e9\u00e9\u00e9"])
    tables = {
        key: pa.table({"value": pa.array(known, pa.string()), "count": [1] * len(known)})
        for n, known in enumerate(words, 1)
        for key in (f"C{n}/0", f"S{n}/1")
    }
    return Features(spec, FittedState(tables=tables))


def test_an_error_of_columns_together_names_the_column_that_has_it(columns, features):
    with raises(FeatureError, "'F2'"):
        features.inputs(columns | {"F2": pa.array([None] * 50, pa.date32())})


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 50])
def test_columns_together_have_the_values_that_each_has_alone(rows, columns, features):
    columns = {name: values.slice(0, rows) for name, values in columns.items()}
    together = features.inputs(columns)
    alone: dict[str, pa.Array] = {}
    for column in features.spec.columns[1:]:
        alone |= features._run_group([column], columns, {})
    assert list(together) == list(alone)
    for name, values in alone.items():
        assert together[name].type == values.type, name
        assert repr(together[name].to_pylist()) == repr(values.to_pylist()), name
