"""A feature table asked by key, over tables that a job wrote: against a plain search through the same rows."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sluice import FeatureTable
from tests.etl import jobs
from tests.run_program import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "examples"))
    from feature_store import FeatureStore

ROWS, USERS = 3000, 60
SPEC = """
[input]
format = "tsv"
columns = ["user:text", "at:float", "spent:float", "label:int", "word:text", "words:text"]

[table]
row_group_rows = 128
split = {train = 0.6, test = 0.4}

[[column]]
name = "user"
role = "key"

[[column]]
name = "at"
role = "time"

[[column]]
name = "label"
role = "label"

[[column]]
name = "spent"
role = "dense"
ops = [{op = "fill", value = 0}]

[[column]]
name = "word"
role = "sparse"
ops = [{op = "hash", size = 1000}]

[[column]]
name = "bag"
from = ["words"]
role = "id_list"
ops = [{op = "split", separator = " "}, {op = "hash", size = 1000}]
"""


def lines(rows: int, first: int = 0) -> str:
    """Rows of few users at few times, so that many agree in both; `spent` is the row's number."""
    draw = random.Random(first)
    return "".join(
        f"u{draw.randrange(USERS)}\t{draw.randrange(200) / 4}\t{first + n}\t{draw.randrange(2)}\tw{n}\t"
        f"{' '.join('abc'[: draw.randrange(4)])}\n"
        for n in range(rows)
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    (folder / "rows.tsv").write_text(lines(ROWS))
    (folder / "more.tsv").write_text(lines(ROWS // 10, ROWS))
    jobs.run(None, folder / "users", folder / "rows.tsv", text=SPEC)
    jobs.run(None, folder / "users", folder / "more.tsv", text=SPEC, mode="append")
    return folder / "users"


@pytest.fixture(scope="module")
def rows(made) -> list[dict]:
    return jobs.rows_of(FeatureTable.open(made))


@pytest.mark.parametrize("before", [False, True])
def test_values_as_of_a_time_are_those_of_a_plain_search(made, rows, before):
    store, draw = FeatureStore.open(made), random.Random(5)
    keys = [f"u{draw.randrange(USERS + 5)}" for _ in range(500)]
    times = [draw.choice((draw.randrange(-4, 210) / 4, draw.random() * 50)) for _ in keys]
    times[:3] = [None, float("nan"), float("inf")]
    rows_then = store.as_of(keys, pa.array(times, pa.float64()), before=before).to_pylist()
    seen = 0
    for key, time, row in zip(keys, times, rows_then, strict=True):
        known = [
            r["at"]
            for r in rows
            if time is not None
            and r["user"] == key
            and (r["at"] < time if before else r["at"] <= time)
        ]
        seen += bool(known)
        if not known:
            assert row == dict.fromkeys(row)
        else:
            assert row["at"] == max(known)
            assert row["spent"] in [
                r["spent"] for r in rows if (r["user"], r["at"]) == (key, row["at"])
            ]
    assert 300 < seen < 500


def test_the_newest_values_of_a_key(made, rows):
    store = FeatureStore.open(made)
    assert (len(store), "u1" in store, "nobody" in store) == (USERS, True, False)
    row = store["u1"]
    assert row["at"] == max(r["at"] for r in rows if r["user"] == "u1")
    stored = next(r for r in rows if r["spent"] == row["spent"])
    assert row["word"] == stored["word"]
    assert row["bag"] == np.frombuffer(stored["bag"], "<i4").tolist()
    with pytest.raises(KeyError):
        store["nobody"]
    nothing = dict.fromkeys(store.values.column_names)
    assert store.newest(["nobody", "u1", None]).to_pylist() == [nothing, row, nothing]
    first = FeatureStore.open(made, 0)
    assert max(first.values["spent"].to_pylist()) < ROWS <= max(store.values["spent"].to_pylist())
