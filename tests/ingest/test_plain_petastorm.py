"""Petastorm's predicates and TransformSpecs over plain Parquet as it is: what they give is what roles and specs are
of."""

import numpy as np
import pyarrow as pa
import pytest

from sluice import Loader
from sluice.ingest.choices import READERS
from sluice.ingest.read.parquet_files import ParquetError, table_of
from sluice.ingest.read.petastorm import compat
from tests.etl.tables import write_rows
from tests.ingest.test_plain_columns import FILES, ROWS, SPEC, clicks, log, rows_of  # noqa: F401
from tests.open_loader import first_batch, open_loader
from tests.product import (
    BatchLoader,
    ColumnError,
    Columns,
    Hash,
    ParquetFiles,
    PetastormOptions,
    RowGroupReader,
    Spec,
)
from tests.raises import raises

compat.install()

from petastorm.predicates import in_lambda  # noqa: E402
from petastorm.transform import TransformSpec  # noqa: E402

pytestmark = pytest.mark.slow


def test_a_predicate_leaves_rows_out_of_a_spec_s_split(clicks):  # noqa: F811
    source = ParquetFiles.open(clicks, spec=Spec.own(SPEC))
    wanted = PetastormOptions(
        predicate=in_lambda(
            ["device.size.width", "price"],
            lambda width, price: (width > 300) & (price.astype(float) < 200),
        )
    )
    for split in ("train", "test"):
        every = rows_of(source, split)
        chosen_rows = rows_of(source, split, reader="petastorm", petastorm=wanted)
        chosen = {
            n for n in range(ROWS * FILES) if n % 5 and n % 900 > 300 and n % 7 and n / 4 < 200
        }
        assert chosen_rows == {row: values for row, values in every.items() if row in chosen}
        assert 0 < len(chosen_rows) < len(every) / 2


def languages(frame):
    frame["language"] = np.where(
        frame["device.os"] == "ios", "en", frame["country"].astype(object).fillna("none")
    )
    frame["score"] = frame["score"] * 2
    return frame.drop(columns="tags")


SPOKEN = TransformSpec(
    languages,
    edit_fields=[("language", np.str_, (), False), ("score", np.float64, (), False)],
    removed_fields=["tags"],
)


def test_roles_and_hashes_are_of_what_a_transform_spec_gives(clicks):  # noqa: F811
    roles = (
        "label=clicked;dense=score;sparse=language%100,device.os%10,user_id%1000,country%50,items"
    )
    source = table_of(clicks, roles, transform_spec=SPOKEN)
    batch = first_batch(source, 40, transforms=[SPOKEN])
    rows = log(np.arange(40)).to_pylist()
    systems = [row["device"] and row["device"]["os"] for row in rows]
    spoken = [
        "en" if system == "ios" else row["country"] or "none"
        for system, row in zip(systems, rows, strict=True)
    ]
    assert batch["score"].tolist() == [2.0 * row["score"] for row in rows]
    for name, size, texts in (
        ("language", 100, spoken),
        ("device.os", 10, systems),
        ("user_id", 1000, [str(row["user_id"]) for row in rows]),
        ("country", 50, [row["country"] for row in rows]),
    ):
        assert (
            batch[name].tolist()
            == Hash(size=size).apply(pa.array(texts, pa.string()), None).to_pylist()
        )
    assert batch["items"].lengths.tolist() == [len(row["items"]) for row in rows]


def test_values_that_petastorm_may_change_or_leave_out_are_not_refused_by_footers(clicks):  # noqa: F811
    options = {"batch_size": 40, "roles": {"label": "clicked", "dense": ["score", "price"]}}
    with raises(ColumnError, "part-0.parquet", "'price'", "19 empty"):
        open_loader(clicks, **options)
    there = PetastormOptions(predicate=in_lambda(["price"], lambda price: price.notna()))
    filled = TransformSpec(
        lambda frame: frame.assign(price=frame["price"].astype(float).fillna(-1)),
        edit_fields=[("price", np.float64, (), False)],
    )
    for more in ({"petastorm": there}, {"transforms": [filled]}):
        with open_loader(clicks, **options, **more) as loader:
            assert min(float(batch["price"].min()) for batch in loader) == (
                -1.0 if "transforms" in more else 0.25
            )


@pytest.mark.parametrize(
    ("open_it", "facts"),
    [
        (
            lambda files: table_of(files, spec=Spec.own(SPEC), transform_spec=SPOKEN),
            ("spec", "TransformSpec", "roles", "hash"),
        ),
        (
            lambda files: BatchLoader(ParquetFiles.open(files), batch_size=40, transforms=[SPOKEN]),
            ("TransformSpec", "paths", "ParquetFiles.open"),
        ),
        (
            lambda files: table_of(files, "label=clicked;sparse=tags%9", transform_spec=SPOKEN),
            ("roles", "'tags'"),
        ),
    ],
)
def test_what_does_not_go_together_is_refused(clicks, open_it, facts):  # noqa: F811
    with raises(ParquetError, *facts):
        open_it(clicks)


@pytest.mark.parametrize("reader", READERS)
def test_a_row_group_without_rows_of_the_split_gives_none(clicks, reader):  # noqa: F811
    spec = Spec.own(
        SPEC.replace('split_by = "user_id"', 'split_time = "ts"').replace(
            "split = {train = 0.7, test = 0.3}", "split = {train = 0, test = 1704240000}"
        )
    )
    source = ParquetFiles.open(clicks, spec=spec)
    made = source.made("train", Columns.of(source.fields).names)
    groups = RowGroupReader(source.files_of("train"), made.sources, made=made)
    assert [sum(counts) for counts in groups.row_groups] == [412, 0]
    groups.close()
    with open_loader(source, batch_size=32, reader=reader) as loader:
        assert sum(batch.rows for batch in loader) > 0


@pytest.mark.parametrize("fault", ["more", "renamed", "missing", "text", "list"])
@pytest.mark.parametrize("due", [1, 5])
def test_columns_of_drawn_files_are_checked_before_the_first_batch(tmp_path, fault, due):
    """A TransformSpec's function gets every column of the first file. Later files may lack it, or hold another type."""
    rows = np.arange(16)
    changes = {
        "more": {"extra": rows, "more": rows},
        "renamed": {"extras": rows},
        "missing": {},
        "text": {"extra": rows.astype(str)},
        "list": {"extra": [[n] for n in rows]},
    }
    for number in range(6):
        columns = {"label": rows % 2, "item": rows + number, "price": rows * 0.5}
        columns |= changes[fault] if number == due else {"extra": rows}
        write_rows(tmp_path / f"part-{number}.parquet", **columns)
    edits = [("price", np.float32, (), False)]
    options = {
        "batch_size": 8,
        "roles": {"label": "label", "dense": ["price"], "sparse": ["item"]},
        "transforms": [TransformSpec(lambda frame: frame, edit_fields=edits)],
    }
    if fault == "more":
        with Loader(tmp_path, **options) as loader:
            assert len(list(loader)) == 12
    else:
        with raises(ParquetError, f"part-{due}.parquet", "extra"):
            Loader(tmp_path, **options)
