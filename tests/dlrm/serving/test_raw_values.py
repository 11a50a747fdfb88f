"""The same raw value is the same feature to a job and to a server, whatever format the job reads."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from sluice import FeatureTable
from tests.dlrm.serving.stub import body_of, decoded, servable
from tests.etl.jobs import rows_of, run
from tests.product import Decoder, Features, FittedState, Spec
from tests.raises import assert_names

SPEC = """
[input]
format = "%s"
columns = ["label:int", "row:int", "word:text", "size:float"]
[table]
split = {train = 1}
[[column]]
name = "label"
role = "label"
[[column]]
name = "row"
role = "dense"
ops = [{op = "fill"}]
[[column]]
name = "word"
role = "sparse"
ops = [{op = "vocabulary", values = ["", " ", "a"], oov = 2}]
[[column]]
name = "hashed"
from = "word"
role = "sparse"
ops = [{op = "hash", size = 1000}]
[[column]]
name = "parts"
from = "word"
role = "id_list"
ops = [{op = "split", separator = "a"}, {op = "hash", size = 1000}]
[[column]]
name = "joined"
from = ["word", "row"]
role = "sparse"
ops = [{op = "cross", size = 1000}]
[[column]]
name = "size"
role = "dense"
ops = [{op = "fill", value = -1}]
"""
WORDS = ["", None, " ", "\u00a0", "a", "aa", " a "]
LACKING = len(WORDS)
"""The number of the row that names no word at all."""


def as_field(form: str, word: str | None) -> str:
    return f'"{word}"' if form == "csv" and word is not None else word or ""


def as_read(made: list[pa.Array] | dict[str, pa.Array]) -> dict[str, list[object]]:
    return {name: values.to_pylist() for name, values in dict(made).items()}


@pytest.mark.parametrize("form", ["tsv", "csv"])
def test_a_text_is_the_same_feature_to_a_job_and_to_a_server(form, tmp_path):
    """An empty text is no missing one, but in TSV, which writes both alike."""
    text = SPEC % form
    mark = "," if form == "csv" else "\t"
    (tmp_path / "rows").write_text(
        "".join(
            mark.join(("0", str(n), as_field(form, word), "\n"))
            for n, word in [*enumerate(WORDS), (LACKING, None)]
        )
    )
    run(None, tmp_path / "table", tmp_path / "rows", text=text)
    job = {int(row["row"]): row for row in rows_of(FeatureTable.open(tmp_path / "table"))}
    assert len(job) == len(WORDS) + 1
    assert (job[0]["word"] == job[1]["word"]) == (form == "tsv")
    spec = Spec.parse(text)
    decoder, features = Decoder(spec, "", most_rows=99), Features(spec, FittedState())
    rows = [{"row": n, "word": word, "size": None} for n, word in enumerate(WORDS)]
    body = body_of(*rows, {"row": LACKING})
    served = as_read(features.inputs(decoded(decoder, body)))
    for number, row in enumerate(served["row"]):
        for name in ("word", "hashed", "joined", "size"):
            assert served[name][number] == job[int(row)][name], (name, number)
        ids = b"".join(id_.to_bytes(4, "little") for id_ in served["parts"][number])
        assert ids == job[int(row)]["parts"], number


NUMBERS = """
[input]
format = "json"
columns = ["label:int", "row:int", "x:float", "y:float"]
[table]
split = {train = 1}
[[column]]
name = "label"
role = "label"
[[column]]
name = "row"
role = "dense"
ops = [{op = "fill"}]
[[column]]
name = "x"
role = "dense"
ops = [{op = "fill"}]
[[column]]
name = "y"
role = "dense"
ops = [{op = "fill", online = true}, {op = "scale", by = 1e-27, online = true}, {op = "scale", by = 10, online = true}]
[[column]]
name = "id"
from = "row"
role = "sparse"
ops = [{op = "hash", size = 10}]
"""
LARGE = [1.0, 3.4028235677973362e38, -1.7e308, 1e39, 1e300, 1e12, 1e14, -5.0]
"""Float32 holds the first two; what `y` makes of them is too large from 1e14 on."""


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_number_that_a_job_rejects_is_422_for_a_server_and_others_are_the_same(name, tmp_path):
    rows = [{"row": n, name: value} for n, value in enumerate(LARGE)]
    (tmp_path / "rows").write_text("".join(json.dumps({"label": 0, **row}) + "\n" for row in rows))
    result = run(None, tmp_path / "table", tmp_path / "rows", text=NUMBERS, max_rejects=0.9)
    table = FeatureTable.open(tmp_path / "table")
    kept = {int(row["row"]): row for row in rows_of(table)}
    assert result.rejected == {f"{name}: NaN, or too large for float32": len(LARGE) - len(kept)}
    assert sorted(kept) == ([0, 1, 5, 6, 7] if name == "x" else [0, 5, 7])
    served = servable(table, SimpleNamespace(name="id", rows=12))
    decoder = Decoder(table.spec(), "", most_rows=99)

    def batch(some, problems):
        return served.batch(decoded(decoder, body_of(*some)), problems)

    for row in rows:
        if row["row"] in kept:
            (dense,) = batch([row], {}).dense.tolist()
            stored = kept[row["row"]]
            made = {"x": stored["x"], "y": float(served.online["y"](pa.array([stored["y"]]))[0])}
            assert dense == [np.float32(row["row"]), np.float32(made["x"]), np.float32(made["y"])]
        else:
            batch([rows[0], row, rows[0]], problems := {})
            assert list(problems) == [1]
            assert_names(problems[1], f"'{name}'", "float32")
