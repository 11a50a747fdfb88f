"""Keys of joins over several columns, whose texts hold what stands between them: no key is taken for another."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.etl.jobs import build_table
from tests.etl.tables import column, section, write_rows, write_spec
from tests.product import InputError, key_texts
from tests.raises import raises

TEXTS = st.text("\x1b\x1f01a", max_size=4)


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=20))
def test_different_keys_are_different_texts(rows):
    made = key_texts(
        [pa.array([row[number] for row in rows], pa.string()) for number in range(3)]
    ).to_pylist()
    assert len(set(made)) == len(set(rows))
    assert key_texts([pa.array(["a\x1fb", None])]).to_pylist() == [
        "a\x1fb",
        None,
    ]  # one column is its own key
    assert key_texts([pa.array(["a", None]), pa.array([None, "b"])]).to_pylist() == [None, None]


@pytest.mark.spark
def test_a_text_is_never_compared_with_the_text_of_a_double(spark, tmp_path):
    write_rows(tmp_path / "side.parquet", a=[17.0, None], level=[1, 2])
    write_rows(tmp_path / "rows.parquet", click=[0, 1], a=["17", "x"])
    text = write_spec(
        "click:int a:text",
        section("join", path=f"{tmp_path}/side.parquet", on=["a"], columns=["level:int"]),
        column("level", "dense", "fill"),
    )
    with raises(InputError, "side.parquet", "'a' holds double", "17.0", "as int or float"):
        build_table(spark, tmp_path / "t", tmp_path / "rows.parquet", text=text)
