"""Columns come and go in an overwrite with --update-state, and the others keep their ids."""

import pyarrow as pa

from tests.etl.jobs import build_table, run, words_of
from tests.etl.tables import column, write_rows, write_spec


def spec(*columns: str) -> str:
    made = (column(name, "sparse", "categorify") for name in columns)
    return write_spec("click:int a:text b:text c:text", *made)


def test_what_both_specs_learn_alike_keeps_its_ids(tmp_path):
    def write(name: str, **columns: str):
        write_rows(
            tmp_path / name,
            pa.table({"click": [0, 1] * 3, **{n: list(v) for n, v in columns.items()}}),
        )
        return tmp_path / name

    def values(column: str) -> list[str]:
        return words_of(tmp_path / "t", f"{column}/0")

    first = write("1.parquet", a="xxxyyz", b="pppqqr", c="uuuuuu")
    second = write("2.parquet", a="zzzzzw", b="rrrrrs", c="vvvvuu")
    run(None, tmp_path / "t", first, text=spec("a", "b"))
    assert (values("a"), values("b")) == (["x", "y", "z"], ["p", "q", "r"])
    table = build_table(
        None, tmp_path / "t", second, text=spec("a", "c"), mode="overwrite", update_state=True
    )
    assert [f.name for f in table.fields] == ["click", "a", "c"]
    assert values("a") == ["x", "y", "z", "w"]  # as before, though z is the most frequent now
    assert values("c") == ["v", "u"]
    assert "b/0" not in table.state().tables
    run(None, tmp_path / "t", second, text=spec("a", "c"), mode="overwrite")
    assert values("a") == ["z", "w"]  # without it, all is learned anew
