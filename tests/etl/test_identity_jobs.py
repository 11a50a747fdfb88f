"""Whole jobs: where rows lie stays, is refused, or is accepted."""

import numpy as np
import pyarrow as pa
import pytest

from sluice import FeatureTable
from sluice.etl.spec.row_identity import KeyColumn
from tests.etl.jobs import Said, rows_of, run
from tests.etl.tables import column, columns_of, write_rows, write_spec
from tests.product import Sketch, SplitMoved, SplitRows, hash_of
from tests.raises import assert_names, raises

ROWS = 4000
COLUMNS = ("click:int", "id:int", "user:text", "price:float")


def spec(
    *columns: str, split: str = "{train = 0.6, test = 0.4}", table: str = "", more: str = ""
) -> str:
    return write_spec(
        columns,
        column("id", "dense", "fill"),
        column("user", "sparse", "hash, size = 4000"),
        more,
        table=f"split = {split}\nrow_group_rows = 512\n{table}",
        label="click",
    )


def noise(first: int = 0, rows: int = ROWS) -> pa.Table:
    drawn = np.random.default_rng(first + 5)
    return pa.table(
        {
            "click": drawn.integers(0, 2, rows),
            "id": np.arange(first, first + rows),
            "user": [f"u{n}" for n in drawn.integers(0, 3000, rows)],
            "price": drawn.random(rows),
        }
    )


def ids(table: FeatureTable, split: str) -> set[float]:
    return {row["id"] for row in rows_of(table, split)}


def test_rows_stay_where_they_lie_and_a_job_that_moves_them_is_refused(tmp_path):
    out, said = tmp_path / "t", Said()
    rows = noise()
    write_rows(tmp_path / "first.parquet", rows)
    write_rows(tmp_path / "more.parquet", rows.append_column("more", pa.array(np.arange(ROWS) % 7)))
    run(None, out, tmp_path / "first.parquet", text=spec(*COLUMNS))
    wider = spec(
        "more:int",
        *COLUMNS[::-1],
        more=column("more", "dense", "fill"),
    )
    run(None, out, tmp_path / "more.parquet", text=wider, mode="overwrite", said=said)
    tables = [FeatureTable.open(out, version) for version in (0, 1)]
    for split in ("train", "test"):
        assert ids(tables[0], split) == ids(tables[1], split)
    assert "warning" not in said.text
    assert tables[0].record.identity == tables[1].record.identity
    # What the tasks gathered is what all rows at once make.
    rule = tables[0].record.identity
    keys = hash_of(
        columns_of(rows),
        rule.recognised,
        rule.seed,
    )
    number = rows["id"].to_numpy()
    for split, sketch in SplitRows.of([tables[1].record]).sketches[rule.recognition].items():
        there = np.isin(number, sorted(ids(tables[1], split)))
        assert sketch.to_json() == Sketch.of(keys[there]).to_json()
    write_rows(
        tmp_path / "again.parquet",
        pa.concat_tables([rows.slice(0, 500), noise(ROWS, 100)]).append_column(
            "more", pa.array([n % 7 for n in range(600)])
        ),
    )
    run(None, out, tmp_path / "again.parquet", text=wider, mode="append", said=said)
    assert_names(said.text, "warning:", 500, "600 rows")
    recut = wider.replace("train = 0.6, test = 0.4", "train = 0.3, test = 0.7")
    with pytest.raises(
        SplitMoved, match=r"^4\d(\.\d)? % of the rows of split 'test' lay in 'train' in version 2"
    ):
        run(None, out, tmp_path / "more.parquet", text=recut, mode="overwrite")
    assert FeatureTable.open(out).version == 2
    assert len(list((out / "data").iterdir())) == 3  # and nothing of it is left
    run(
        None,
        out,
        tmp_path / "more.parquet",
        text=recut,
        mode="overwrite",
        split_moved="accept",
        said=said,
    )
    assert_names(said.text, "warning:", "'train'", "version 2")


def test_rows_of_one_key_are_told_apart_by_the_time_that_splits_them(tmp_path):
    """A user may be in both splits, at other times: an overwrite with the same rows moves none of them."""
    times = np.arange(200.0)
    rows = write_rows(
        tmp_path / "rows.parquet",
        click=[0, 1] * 100,
        user=[f"u{n % 100}" for n in range(200)],
        at=times,
    )

    def text(end: int) -> str:
        return write_spec(
            ("click:int", "user:text", "at:float"),
            column("user", "sparse", "hash, size = 400"),
            table=f'key = ["user"]\nsplit_time = "at"\nsplit = {{train = 0, test = {end}}}',
        )

    run(None, tmp_path / "t", rows, text=text(100))
    said = Said()
    run(None, tmp_path / "t", rows, text=text(100), mode="overwrite", said=said)
    assert "warning" not in said.text
    with raises(SplitMoved, "33.3 %", "'test'"):
        run(None, tmp_path / "t", rows, text=text(50), mode="overwrite")
    assert FeatureTable.open(tmp_path / "t").version == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_key_that_was_first_read_as_float_has_the_hash_of_that_float(seed):
    """Also beyond 2^53, where the float is rounded, and for texts that are no number, which count as missing."""
    draw = np.random.default_rng(seed)
    wholes = [0, 1, -7, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), None]
    wholes += draw.integers(-(2**63), 2**63 - 1, 20).tolist()
    texts = {"7": 7.0, " 7.0\t": 7.0, "1e3": 1e3, "-0.25": -0.25, "x": None, "": None, "1,5": None}
    texts |= {str(whole): float(whole) for whole in wholes if whole is not None}
    mixed, proper = [*texts, None], [text for text, number in texts.items() if number is not None]
    given = [
        ("int", pa.array(wholes, pa.int64()), [w if w is None else float(w) for w in wholes]),
        ("text", pa.array(mixed), [texts.get(str(text)) for text in mixed]),
        ("text", pa.array(proper), [texts[text] for text in proper]),
        ("text", pa.array(mixed).dictionary_encode(), [texts.get(str(text)) for text in mixed]),
    ]
    first = KeyColumn.of("k", "float")
    for kind, values, floats in given:
        later = KeyColumn(name="k", type=kind, first="k", first_type="float")
        want = hash_of({"k": pa.array(floats, pa.float64())}, [first], seed)
        assert hash_of({"k": values}, [later], seed).tolist() == want.tolist()
