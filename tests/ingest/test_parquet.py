"""Any Parquet: folders, globs and lists, bags in every layout, missing values, and what is refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.read.parquet_files import ParquetError
from tests.etl.tables import write_rows
from tests.open_loader import open_loader
from tests.product import BatchLoader, ColumnError, ParquetFiles, TransformError
from tests.raises import raises
from tests.run_program import run_program

pytestmark = pytest.mark.slow

ROWS = (700, 0, 1, 123, 400)


def columns(rows: int, first: int, **types) -> dict:
    """`number` tells rows apart; bag b of row n holds n mod 5 ids from n on, bag c always three."""
    numbers = np.arange(first, first + rows)
    bags = [list(range(n, n + n % 5)) for n in numbers]
    return {
        "click": pa.array(numbers % 2, pa.int8()),
        "number": pa.array(numbers, pa.float64()),
        "user": pa.array(numbers * 3, pa.int64()),
        "b": pa.array(bags, types.get("b", pa.list_(pa.int32()))),
        "c": pa.array([[n, n, 7] for n in numbers], types.get("c", pa.list_(pa.int64()))),
        "note": pa.array([str(n) for n in numbers]),
    }


def packed(table: dict) -> dict:
    """Bags as bytes."""
    return table | {
        name: pa.array(
            [np.array(bag, "<i4").tobytes() for bag in table[name].to_pylist()], pa.binary()
        )
        for name in ("b", "c")
    }


def write(folder, change=lambda table: table) -> None:
    """Files of uneven row groups, one of them without rows."""
    first = 0
    for number, rows in enumerate(ROWS):
        pq.write_table(
            pa.table(change(columns(rows, first))),
            folder / f"part-{number}.parquet",
            row_group_size=97,
            write_page_checksum=True,
        )
        first += rows


ASKED = {"label": "click", "dense": ["number"], "sparse": "user", "id_list": ["b", "c"]}


def expect(loader, batch) -> None:
    """A batch of rows as `columns` makes them, whichever rows they are."""
    numbers = (
        batch.dense[: batch.rows, 0].numpy().astype(int)
        if batch.rows == len(batch.label)
        else batch.dense[batch.weight.numpy() > 0, 0].numpy().astype(int)
    )
    lengths = batch.lengths.view(len(loader.sparse_names), -1).numpy()
    real = batch.weight.numpy() > 0
    parts = np.split(batch.values.numpy(), np.cumsum(lengths.sum(1))[:-1])
    assert loader.sparse_names == ("user", "b", "c")
    assert lengths[1][real].tolist() == (numbers % 5).tolist()
    assert lengths[2][real].tolist() == [3] * len(numbers)
    assert not lengths[1:, ~real].any()
    assert parts[0][real].tolist() == (numbers * 3).tolist()
    assert parts[1].tolist() == [i for n in numbers for i in range(n, n + n % 5)]
    assert parts[2].tolist() == [i for n in numbers for i in (n, n, 7)]


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
@pytest.mark.parametrize("change", [lambda t: t, packed], ids=["lists", "bytes"])
@pytest.mark.parametrize(
    ("shuffle", "batch_size", "window"), [(True, 64, 200), (False, 64, 200), (True, 1000, None)]
)
def test_bags_and_numbers_come_together(tmp_path, reader, change, shuffle, batch_size, window):  # noqa: PLR0917
    write(tmp_path, change)
    with open_loader(
        tmp_path,
        batch_size=batch_size,
        roles=ASKED,
        epochs=2,
        shuffle=shuffle,
        window_rows=window,
        last="pad",
        reader=reader,
    ) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                expect(loader, batch)
                seen += batch.dense[batch.weight > 0, 0].int().tolist()
            assert sorted(seen) == list(range(sum(ROWS)))


def test_a_transform_may_cut_bags(tmp_path):
    def first_of_b(arrays):
        ends = np.cumsum(arrays["b.lengths"])
        some = arrays["b.lengths"] > 0
        return {"b": arrays["b"][(ends - arrays["b.lengths"])[some]], "b.lengths": some.astype(int)}

    write(tmp_path)
    with BatchLoader(
        tmp_path, batch_size=64, roles=ASKED, transforms=[("first", first_of_b)]
    ) as loader:
        for batch in loader:
            numbers = batch.dense[:, 0].int()
            lengths = batch.lengths.view(3, -1)
            assert lengths[1].tolist() == (numbers % 5 > 0).int().tolist()
            assert (
                batch.values[64 : 64 + int(lengths[1].sum())].tolist()
                == numbers[numbers % 5 > 0].tolist()
            )

    wrong = [("wrong", lambda arrays: {"b.lengths": arrays["b.lengths"] + 1})]
    with (
        BatchLoader(tmp_path, batch_size=64, roles=ASKED, transforms=wrong) as loader,
        raises(TransformError, "'wrong'", "epoch 0, step 0", "'b.lengths'", "64 rows"),
    ):
        next(iter(loader))


def test_a_glob_and_a_list_and_one_file(tmp_path):
    write(tmp_path)
    everything = ParquetFiles.open(tmp_path, ASKED)
    assert [f.rows for f in everything.files] == list(ROWS)
    assert ParquetFiles.open(f"{tmp_path}/part-*.parquet", ASKED).files == everything.files
    some = [tmp_path / "part-3.parquet", tmp_path / "part-0.parquet"]
    assert [f.rows for f in ParquetFiles.open(some, ASKED).files] == [123, 700]
    assert [f.rows for f in ParquetFiles.open(some[0], ASKED).files] == [123]
    assert ParquetFiles.open(some, ASKED).version != everything.version
    (tmp_path / "day[1]").mkdir()  # a name that could be a pattern
    write(tmp_path / "day[1]")
    several = [tmp_path / "day[1]", f"{tmp_path}/part-[03].parquet"]
    assert [f.rows for f in ParquetFiles.open(several, ASKED).files] == [*ROWS, 700, 123]
    odd = (tmp_path / "part-3.parquet").rename(tmp_path / "part-[3].parquet")
    assert [f.rows for f in ParquetFiles.open(odd, ASKED).files] == [123]


@pytest.mark.parametrize("change", [lambda t: t, packed], ids=["lists", "bytes"])
def test_what_bags_need_is_known_from_footers(tmp_path, change):
    write(tmp_path, change)
    bags = ParquetFiles.open(tmp_path, ASKED).bags
    # 0 to 4; an empty list counts as one, pages have heads
    assert bags["b"] == pytest.approx(2.0, rel=0.25)
    assert bags["c"] == pytest.approx(3.0, rel=0.25)
    with BatchLoader(tmp_path, batch_size=64, roles=ASKED) as loader:
        assert loader._input.columns.bags == bags


def test_missing_values_are_filled_as_asked(tmp_path):
    def holes(table):
        rows = range(len(table["user"]))
        numbers = [None if n % 3 else float(n) for n in rows]
        bags = pa.array([None if n % 2 else [n] for n in rows], pa.list_(pa.int32()))
        return table | {"number": pa.array(numbers, pa.float64()), "b": bags}

    write(tmp_path, holes)
    how = {"batch_size": 400, "roles": ASKED, "shuffle": False, "streams": 1}
    with open_loader(tmp_path, fill={"number": -1}, **how) as loader:
        batch = next(iter(loader))
        assert batch.dense[:6, 0].tolist() == [0, -1, -1, 3, -1, -1]
        assert batch.lengths.view(3, -1)[1, :4].tolist() == [1, 0, 1, 0]
    for fill, facts in (({}, ("part-", "'number'", "empty")), ({"nmber": 0}, ("fill", "'number'"))):
        with raises(ColumnError, *facts):
            open_loader(tmp_path, fill=fill, **how)


def test_few_of_many_columns_are_read(tmp_path):
    wide = {f"x{n}": np.full(500, n, np.float32) for n in range(300)}
    wide["y"] = np.zeros(500, np.int8)
    write_rows(tmp_path / "wide.parquet", row_group_size=100, **wide)
    roles = {"label": "y", "dense": ["x7", "x29?"]}
    with open_loader(tmp_path, batch_size=80, roles=roles) as loader:
        assert loader._input.groups.schema.names == [*loader.dense_names, "y"]
        for batch in loader:
            assert batch.dense[3].tolist() == [7, *range(290, 300)]
            assert len(batch.values) == len(batch.lengths) == 0


@pytest.mark.parametrize(
    ("source", "roles", "facts"),
    [
        ("", {"label": "clik"}, ("roles", "'clik'", "'click'")),
        ("", {"lable": "click"}, ("role", "'lable'", "'label'")),
        ("", {"label": "click", "dense": ["click"]}, ("'click'", "label", "dense")),
        ("no/*.parquet", ASKED, ("/no/*.parquet", "no file")),
        ("none", ASKED, ("/none", "no such file")),
        ("empty", ASKED, ("/empty", "no *.parquet file")),
        ("_bytes/0.parquet", ASKED, ("0.parquet", "empty", "leave it out")),
    ],
)
def test_what_cannot_be_loaded_is_refused(tmp_path, source, roles, facts):
    write(tmp_path)
    for name in ("empty", "_bytes"):
        (tmp_path / name).mkdir()
    (tmp_path / "_bytes" / "0.parquet").touch()
    with raises(ParquetError, *facts):
        BatchLoader(str(tmp_path / source) if source else tmp_path, batch_size=8, roles=roles)


def test_mixed_schemas_are_named(tmp_path):
    write(tmp_path)
    write_rows(tmp_path / "part-9.parquet", **columns(3, 0) | {"number": pa.array(["1", "2", "3"])})
    with raises(ParquetError, "part-9.parquet", "'number'", "string", "part-0.parquet", "double"):
        ParquetFiles.open(tmp_path, ASKED)
    write_rows(tmp_path / "part-9.parquet", click=pa.array([1], pa.int8()), number=[2.0])
    with raises(ParquetError, "part-9.parquet", "'user'", "input.optional"):
        ParquetFiles.open(tmp_path, ASKED)
    assert (
        len(ParquetFiles.open(tmp_path, {"label": "click", "dense": "number"}).files)
        == len(ROWS) + 1
    )


def test_a_split_of_plain_files_is_refused_not_ignored(tmp_path):
    write(tmp_path)
    with raises(ParquetError, "'test'", "'train'"):
        BatchLoader(ParquetFiles.open(tmp_path), batch_size=100, split="test")


@pytest.mark.parametrize("reader", [None, "petastorm"])
def test_a_first_batch_of_files_imports_petastorm_and_pandas_only_if_asked(tmp_path, reader):
    write_rows(tmp_path / "a.parquet", label=np.arange(64) % 2, row=np.arange(64))
    done = run_program(
        "-c",
        "import sys\n"
        "from sluice import Loader, Reading\n"
        "roles = {'label': 'label', 'sparse': 'row'}\n"
        f"files = {str(tmp_path / '*.parquet')!r}\n"
        f"with Loader(files, batch_size=8, roles=roles, reading=Reading(reader={reader!r})) as rows:\n"
        "    next(iter(rows))\n"
        "    print(rows.reader, *sorted({'pandas', 'petastorm'} & {*sys.modules}))\n",
        check=True,
    )
    asked = ["petastorm", "pandas", "petastorm"]
    assert done.stdout.split() == (asked if reader else ["arrow"])
