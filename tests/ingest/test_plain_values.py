"""Plain Parquet that differs from its spec or roles: no value is changed, left out or lost without a warning."""

import decimal
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice import Errors, FeatureTable
from sluice.ingest.read.parquet_files import ParquetError, table_of
from tests.etl.jobs import on
from tests.etl.tables import write_rows
from tests.open_loader import open_loader, quarantined_rows
from tests.product import (
    MOST_TEXT_BYTES,
    BatchLoader,
    ColumnError,
    Job,
    ParquetFiles,
    QuarantineError,
    SourceError,
    Spec,
    TableStore,
    guessed_spec,
    stored_column,
)
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow

ROWS = 64
EXACT = decimal.Context(prec=60)
HEAD = """
[input]
format = "parquet"
columns = ["y:int", %s]
%s
[table]
%s
[[column]]
name = "y"
role = "label"
"""


def spec(columns: str, *made: str, table: str = "split = {train = 1}", more: str = "") -> Spec:
    return Spec.own(
        HEAD % (columns, more, table) + "\n".join(f"[[column]]\n{column}" for column in made),
        "mine.toml",
    )


PRICE = 'name = "price"\nrole = "dense"\nops = [{op = "fill", value = -1}]'
HOUR = (
    'name = "hour"\nfrom = "at"\nrole = "sparse"\n'
    'ops = [{op = "parse_time", format = "%Y-%m-%d %H:%M"}, {op = "hour"}, {op = "modulus", size = 24}]'
)


def write(folder, name: str, rows: int = ROWS, **columns):
    path = folder / f"{name}.parquet"
    write_rows(path, row_group_size=ROWS // 2, **{"y": np.arange(rows) % 2} | columns)
    return path


def rows_of(source, names, **options) -> list[tuple]:
    """The named columns of all rows that count, in their order."""
    options = {"batch_size": 16, "shuffle": False, "streams": 1, "last": "pad"} | options
    with open_loader(source, **options) as loader:
        return [tuple(row) for batch in loader for *row, weight in rows_in(batch, names) if weight]


def rows_in(batch, names) -> list[tuple]:
    """The named columns of a batch's rows, and their weights."""
    columns = [batch[name].tolist() for name in names]
    return list(zip(*columns, batch.weight.tolist(), strict=True))


def lines_with(word: str, capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if word in line]


def splits_by_files_and_by_a_job(folder, files, asked: Spec, **job) -> dict[str, list]:
    """The labels and prices of each split, which plain files and the table that a job makes of them have alike."""
    on(None, Job(spec=asked, inputs=(str(files),), store=TableStore(folder / "table"), **job))
    plain, made = (
        {
            split: sorted(rows_of(source, [asked.label, "price"], split=split))
            for split in asked.table.split
        }
        for source in (ParquetFiles.open(files, spec=asked), FeatureTable.open(folder / "table"))
    )
    assert plain == made
    return plain


# ---- types


@pytest.mark.parametrize(
    "values",
    [
        pa.array([Decimal("2"), None, Decimal("0.5"), Decimal("-7")], pa.decimal256(60, 30)),
        pa.array([2.0, None, float("nan"), -7.0], pa.float32()),
        pa.array([2.0, None, 2.0**63, -7.0]),
    ],
)
def test_a_fraction_is_no_whole_number(values):
    numbers, lost = stored_column(values, "int")
    assert numbers.to_pylist() == [2, None, None, -7]
    assert lost.tolist() == [False, False, True, False]


def test_a_long_decimal_keeps_its_last_digit():
    ids = [Decimal(2**53 + 1), Decimal(2**63 - 1), Decimal(-(2**63)), None, Decimal(2**63)]
    numbers, lost = stored_column(pa.array(ids, pa.decimal128(30, 4)), "int")
    assert numbers.to_pylist() == [*ids[:4], None]
    assert lost.tolist() == [False] * 4 + [True]


@given(st.integers(1, 38), st.data())
@example(17, None)
def test_a_decimal_is_the_nearest_float(precision, data):
    """Of 17 digits, neither the whole number nor its quotient by a power of ten is a float."""
    numbers, scale = [29007199254740993, -90071992547409931, None, 12345678901234567], 3
    if data is not None:
        scale = data.draw(st.integers(0, precision))
        numbers = data.draw(
            st.lists(st.none() | st.integers(-(10**precision) + 1, 10**precision - 1))
        )
    exact = [None if n is None else Decimal(n).scaleb(-scale, EXACT) for n in numbers]
    floats, lost = stored_column(
        pa.array([None, *exact], pa.decimal128(precision, scale))[1:], "float"
    )
    assert floats.to_pylist() == [None if n is None else float(n) for n in exact]
    assert lost is None


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
def test_a_fraction_in_a_column_of_whole_numbers_is_refused_with_its_value(tmp_path, reader):
    prices = [Decimal("0.25") if n == 40 else n for n in range(ROWS)]
    write(tmp_path, "a", price=pa.array(prices, pa.decimal128(9, 2)))
    source = ParquetFiles.open(tmp_path, spec=spec('"price:int"', PRICE))
    facts = ("a.parquet", "row group 1", "'price'", 0.25, "whole", "float", "input.columns")
    with raises(ColumnError, *facts):
        rows_of(source, ["price"], reader=reader)


def test_a_fraction_in_the_column_that_splits_is_refused_with_its_file(tmp_path):
    write(
        tmp_path,
        "a",
        price=np.arange(ROWS, dtype=float),
        day=pa.array([Decimal(n) / 2 for n in range(ROWS)]),
    )
    by_day = spec(
        '"price:float", "day:int"',
        PRICE,
        table='split_time = "day"\nsplit = {train = 0, test = 20}',
    )
    with raises(ColumnError, "a.parquet", "row group 0", "'day'", 15.5, "whole"):
        BatchLoader(ParquetFiles.open(tmp_path, spec=by_day), batch_size=16)


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
@pytest.mark.parametrize(
    "source",
    [
        lambda folder: table_of(folder, "label=y;dense=x,n;sparse=position;id_list=items"),
        lambda folder: ParquetFiles.open(
            folder,
            spec=spec(
                '"position:int", "x:float", "n:float", "items:texts"',
                'name = "x"\nrole = "dense"\nops = [{op = "fill"}]',
                'name = "n"\nrole = "dense"\nops = [{op = "fill"}]',
                'name = "position"\nrole = "sparse"\nops = [{op = "modulus", size = 1000}]',
                'name = "items"\nrole = "id_list"\nops = [{op = "hash", size = 50}]',
            ),
        ),
    ],
)
def test_numbers_of_several_types_come_together(tmp_path, reader, source):
    """Another type in each file: every value that fits is loaded as it is."""
    number = np.arange(ROWS)
    for name, ids, decimals, whole in (
        ("a", pa.int32(), pa.decimal128(4, 2), pa.int8()),
        ("b", pa.int64(), pa.decimal128(9, 3), pa.float64()),
    ):
        write(
            tmp_path,
            name,
            position=pa.array(number, ids),
            x=pa.array(number / 4).cast(decimals),
            n=pa.array(number % 100, whole),
            items=pa.array([[n, n + 1] for n in range(ROWS)], pa.list_(ids)),
        )
    expected = [(float(n % 2), n / 4, float(n % 100), n) for n in (*range(ROWS), *range(ROWS))]
    opened = source(tmp_path)
    offset = rows_of(opened, ["position"], reader=reader)[0][0]  # operators give ids from 2 on
    names = ["y", "x", "n", "position"]
    with open_loader(
        opened, batch_size=16, reader=reader
    ) as loader:  # with rows of both files in a window
        assert sum(batch["items"].lengths.sum().item() for batch in loader) == 4 * ROWS
    assert expected == [
        (y, x, n, position - offset) for y, x, n, position in rows_of(opened, names, reader=reader)
    ]


def test_a_number_that_would_be_hashed_otherwise_does_not(tmp_path):
    write(tmp_path, "a", position=np.arange(ROWS))
    write(tmp_path, "b", position=np.arange(ROWS, dtype=float))
    with raises(ParquetError, "b.parquet", "'position'", "double", "a.parquet", "int64", "spec"):
        table_of(tmp_path, "label=y;sparse=position%100")


# ---- columns that a file may lack


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
@pytest.mark.parametrize("having", [(1,), (0,), ()])
def test_a_column_that_a_file_may_lack_is_null_there(tmp_path, reader, having):
    for number in range(2):
        more = {"price": np.arange(ROWS) + 1.0, "site": ["s"] * ROWS} if number in having else {}
        write(tmp_path, str(number), user=np.arange(ROWS), **more)
    site = 'name = "site"\nrole = "sparse"\nops = [{op = "hash", size = 10}]'
    optional = spec(
        '"user:int", "price:float", "site:text"',
        PRICE,
        site,
        more='optional = ["price", "site"]',
        table='split_by = ["user", "site"]\nsplit = {train = 0.5, test = 0.5}',
    )
    opened = ParquetFiles.open(tmp_path, spec=optional)
    rows = [
        row
        for split in ("train", "test")
        for row in rows_of(opened, ["price", "site"], split=split, reader=reader)
    ]
    assert len(rows) == 2 * ROWS
    there = [n + 1.0 for n in range(ROWS)] if having else []
    assert sorted(price for price, _ in rows) == [-1.0] * (2 * ROWS - len(there)) + there
    assert {site == 1 for price, site in rows if price == -1.0} == {True}, (
        "1 is what null is hashed to"
    )
    needed = spec('"user:int", "price:float"', PRICE)
    if len(having) < 2:
        with raises(ColumnError, "'price'", "input.optional"):
            ParquetFiles.open(tmp_path, spec=needed)


# ---- splits


def test_the_split_that_is_loaded_is_named_once_with_what_it_leaves_out(tmp_path, capsys):
    write(tmp_path, "a", price=np.arange(ROWS) / 2, day=np.arange(ROWS))
    parts = spec(
        '"price:float", "day:int"',
        PRICE,
        table='split_time = "day"\nsplit = {train = 0, test = 40}',
    )
    for _ in range(2):
        assert len(rows_of(ParquetFiles.open(str(tmp_path), spec=parts), ["price"])) == 40
    [line] = lines_with("split=", capsys)
    assert_names(line, tmp_path, "40 of 64 rows", "'train'", "train, test")
    rows_of(ParquetFiles.open(str(tmp_path), spec=spec('"price:float"', PRICE)), ["price"])
    assert "split=" not in capsys.readouterr().err, "there is only one"


# ---- times


def at(good: int) -> list[str]:
    return [
        f"2024-01-{n % 28 + 1:02} 10:00" if n < good else f"{n % 28 + 1}.1.2024"
        for n in range(ROWS)
    ]


def test_a_format_that_reads_hardly_any_value_is_refused_and_a_few_are_logged(tmp_path, capsys):
    hours = spec('"at:text"', HOUR)
    write(tmp_path, "a", at=at(ROWS))
    assert {
        hour for (hour,) in rows_of(ParquetFiles.open(str(tmp_path), spec=hours), ["hour"])
    } == {12}
    assert "'hour'" not in capsys.readouterr().err
    write(tmp_path, "b", at=at(ROWS // 2 - 12))  # of its first 32 rows, 20 can be read
    with raises(
        ColumnError, "b.parquet", "'hour'", "68.8%", "first 64 rows", "'21.1.2024'", "format"
    ):
        BatchLoader(ParquetFiles.open(tmp_path, spec=hours), batch_size=16)
    write(tmp_path, "b", at=at(ROWS - 8))
    for _ in range(2):
        assert len(rows_of(ParquetFiles.open(str(tmp_path), spec=hours), ["hour"])) == 2 * ROWS
    [line] = lines_with("'hour'", capsys)
    assert_names(line, "b.parquet", "12.5%", "first 64 rows", "'1.1.2024'", "missing")


# ---- rows that are quarantined


@pytest.mark.parametrize("reader", ["arrow", "petastorm"])
def test_rows_of_which_a_column_cannot_be_made_are_quarantined(tmp_path, reader):
    labels = np.where(np.isin(np.arange(ROWS), (3, 40)), 2, np.arange(ROWS) % 2)
    write(tmp_path, "a", y=labels, price=np.where(np.arange(ROWS) == 50, 0.5, np.arange(ROWS)))
    source = ParquetFiles.open(tmp_path, spec=spec('"price:int"', PRICE))
    listed = tmp_path / "aside.jsonl"
    errors = Errors(on_error="quarantine", quarantine=listed)
    with open_loader(
        source, batch_size=16, errors=errors, shuffle=False, streams=1, reader=reader
    ) as loader:
        for _ in range(2):
            rows = [row for batch in loader for row in rows_in(batch, ["price"])]
            assert len(rows) == ROWS
            expected = [n for n in range(ROWS) if n not in (3, 40, 50)]
            assert [price for price, weight in rows if weight] == expected
        assert loader.quarantined == {
            "rows_set_aside": 3,
            "reasons": {"read: ColumnError": 3},
            "file": str(listed),
        }
    assert {
        (row["row_group"], row["row"], row["reason"].split(",")[0])
        for row in quarantined_rows(listed)
    } == {
        (0, 3, "column 'y' holds 2"),
        (1, 8, "column 'y' holds 2"),
        (1, 18, "column 'price' holds 0.5"),
    }


@pytest.mark.parametrize("repeated", [False, True])
def test_a_text_that_is_too_long_is_an_error_by_name_or_quarantined_with_its_row(
    tmp_path, repeated
):
    """As a dictionary or not, which the first row group decides."""
    texts = [str(n % 2 if repeated else n) for n in range(ROWS)]
    texts[45] = "x" * (MOST_TEXT_BYTES + 1)
    write(tmp_path, "a", ids=texts)
    source = ParquetFiles.open(tmp_path, {"label": "y", "sparse": ["ids"]}, {"ids": 100})
    with raises(ColumnError, "a.parquet", "row group 1", "ids", "1,048,576"):
        rows_of(source, ["ids"])
    errors = Errors(on_error="quarantine", quarantine=tmp_path / "aside.jsonl")
    assert len(rows_of(source, ["ids"], errors=errors)) == ROWS - 1
    [listed] = quarantined_rows(errors.quarantine)
    assert (listed["row_group"], listed["row"]) == (1, 13)


# ---- numbers that are none, and labels


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", ["y", "x"])
def test_a_number_that_is_none_is_refused_or_quarantined_unless_an_option_gives_it_a_meaning(
    tmp_path, value, column
):
    """Of the label and of a feature."""
    path = tmp_path / "a.parquet"
    stored = {"y": np.float32([0, 1, 1, 0]), "x": np.float32([1, 2, 3, 4])}
    stored[column][1] = value
    write_rows(path, **stored)

    def rows(**how):
        roles = {"label": "y", "dense": ["x"]}
        return rows_of(str(path), ["y", "x"], batch_size=2, roles=roles, reader="arrow", **how)

    with raises(QuarantineError, "a.parquet", "row group 0 row 1", repr(column), value, "fill"):
        rows()
    assert rows(fill={column: 0})[1] == ((0, 2) if column == "y" else (1, 0))
    aside = Errors(on_error="quarantine", quarantine=tmp_path / "aside.jsonl")
    assert rows(errors=aside) == [(0, 1), (1, 3), (0, 4)]
    assert [(row["row"], row["stage"]) for row in quarantined_rows(aside.quarantine)] == [
        (1, "batch")
    ]
    assert not np.isfinite(rows(errors=Errors(finite=False))[1]).all()


def test_what_a_transform_makes_no_number_is_quarantined_with_its_reason_but_in_rows_that_do_not_count(
    tmp_path,
):
    """The logarithm of the rows that only fill the last batch is none either: they are not listed, and become 0."""
    write(tmp_path, "a", rows=30, price=np.arange(30.0))
    aside = Errors(on_error="quarantine", quarantine=tmp_path / "aside.jsonl")

    def log(columns):
        with np.errstate(divide="ignore"):
            return {"price": np.log(columns["price"])}

    how = {"roles": "label=y;dense=price", "errors": aside, "transforms": [log], "last": "pad"}
    with open_loader(tmp_path, batch_size=16, **how) as loader:
        rows = [row for batch in loader for row in rows_in(batch, ["price"])]
    assert np.isfinite(rows).all()
    assert sum(weight for _, weight in rows) == 29
    [row] = quarantined_rows(aside.quarantine)
    assert (row["row"], row["type"]) == (0, "ColumnError")
    assert_names(row["reason"], "'price'", "-inf")


@pytest.mark.parametrize(
    ("values", "facts"),
    [([1, 5, 3, 2], ("1 to 5", "cross-entropy")), ([0.5, 1.0, 0.0, 0.25], ())],
)
def test_labels_that_are_no_clicks_are_loaded_as_they_are_after_a_warning(
    tmp_path, capsys, values, facts
):
    write_rows(tmp_path / "a.parquet", y=values, x=[1.0, 2.0, 3.0, 4.0])
    rows = rows_of(str(tmp_path), ["y"], batch_size=4, roles="label=y;dense=x")
    assert [value for (value,) in rows] == values
    warning = capsys.readouterr().err
    assert_names(warning, *facts)
    assert ("cross-entropy" in warning) is bool(facts)


def test_a_file_that_is_meant_twice_is_refused_by_name(tmp_path):
    write(tmp_path, "a", price=np.arange(ROWS) + 0.5)
    for others in (
        tmp_path / "a.parquet",
        tmp_path / "*.parquet",
        f"{tmp_path}/../{tmp_path.name}/a.parquet",
    ):
        with raises(ParquetError, "/a.parquet", "twice"):
            ParquetFiles.open([tmp_path, others])


# ---- rows without a label


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


PRICES = np.arange(ROWS) + 0.5


@pytest.mark.parametrize(
    "table",
    [
        "split = {train = 1}",
        'split_time = "at"\nsplit = {train = 0, test = 20}',
        'key = ["at"]\nsplit = {train = 0.5, test = 0.5}',
    ],
)
def test_rows_without_a_label_lie_in_a_split_of_their_own_as_in_a_job(tmp_path, files, table):
    labels = pa.array([None if n % 5 == 0 else n % 2 for n in range(ROWS)])
    for name in ("a", "b"):
        write(files, name, y=labels, at=np.arange(ROWS), price=PRICES)
    asked = spec('"price:float", "at:int"', PRICE, table=f'{table}\nunlabelled = "ask"')
    splits = splits_by_files_and_by_a_job(tmp_path, files, asked)
    assert len(splits["ask"]) == 2 * -(-ROWS // 5)
    assert sum(map(len, splits.values())) == 2 * ROWS


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_label_that_is_no_number_is_no_0_where_others_have_none(files, value):
    labels = [None, value, *[n % 2 for n in range(ROWS - 2)]]
    write(files, "a", y=pa.array(labels, pa.float64(), from_pandas=False), price=PRICES)
    asked = Spec.own(guessed_spec(files, "y"))
    assert asked.table.unlabelled == "ask"
    with raises(QuarantineError, "'y'", value):
        rows_of(ParquetFiles.open(files, spec=asked), ["price"])


def test_a_missing_label_is_no_0_unless_it_is_filled_by_name(files):
    liked = pa.array([None, True] * (ROWS // 2))
    write(files, "a", price=pa.array([None, *range(ROWS - 1)]), liked=liked)
    source = table_of(files, {"label": "liked", "dense": ["price"], "sparse": ["y"]})
    facts = ("'liked'", "empty", "label", 'unlabelled = "ask"', "fill={'liked': 0}")
    for fill in (0, {"price": 0}):
        with raises(ColumnError, *facts):
            rows_of(source, ["liked"], fill=fill)
    rows = rows_of(source, ["liked"], fill={"liked": 0, "price": 0})
    assert sum(label for (label,) in rows) == ROWS / 2


@pytest.mark.parametrize("by_dictionary", [False, True])
def test_a_missing_text_is_no_negative_in_a_job_or_loader(tmp_path, files, by_dictionary):
    texts = pa.array([("yes", "no", None)[n % 3] for n in range(ROWS)])
    write(files, "a", price=PRICES, bought=texts.dictionary_encode() if by_dictionary else texts)
    roles = {"label": "bought == yes", "dense": "price"}
    with raises((ColumnError, SourceError, QuarantineError), "'bought'", "empty values"):
        rows_of(table_of(files, roles), ["price"])
    text = guessed_spec(files, "bought == yes")
    splits = splits_by_files_and_by_a_job(tmp_path, files, Spec.own(text))
    assert len(splits["ask"]) == ROWS // 3
    assert sum(map(len, splits.values())) == ROWS
    assert sum(label for rows in splits.values() for label, _ in rows) == -(-ROWS // 3)
    lacking = Spec.own(text.replace('unlabelled = "ask"\n', ""))
    store = TableStore(tmp_path / "rejecting")
    done = on(None, Job(spec=lacking, inputs=(str(files),), store=store, max_rejects=0.5))
    assert done.rejected == {"bought: missing": ROWS // 3}


@pytest.mark.parametrize("unlabelled", [False, True])
def test_a_row_that_a_split_by_time_cannot_place_is_in_none_as_in_a_job(
    tmp_path, files, capsys, unlabelled
):
    times = [None if n in (3, 10) else np.nan if n in (20, 41) else float(n) for n in range(ROWS)]
    labels = pa.array([None if unlabelled and n in (5, 10, 41) else n % 2 for n in range(ROWS)])
    write(files, "a", y=labels, at=pa.array(times, from_pandas=False), price=PRICES)
    table = 'split_time = "at"\nsplit = {train = 0, test = 32}'
    table += '\nunlabelled = "ask"' * unlabelled
    asked = spec('"price:float", "at:float"', PRICE, table=table)
    more = {"rejects": str(tmp_path / "rejects"), "max_rejects": 0.1}
    splits = splits_by_files_and_by_a_job(tmp_path, files, asked, **more)
    nowhere = {3, 20} if unlabelled else {3, 10, 20, 41}
    asking = {5, 10, 41} if unlabelled else set()
    for split, rows in (("train", range(32)), ("test", range(32, ROWS)), ("ask", asking)):
        expected = set(rows) - (nowhere if split == "ask" else nowhere | asking)
        assert {int(price) for _, price in splits.get(split, ())} == expected
    reasons = [
        row["reason"]
        for path in (tmp_path / "rejects").rglob("*.json*")
        for row in quarantined_rows(path)
    ]
    assert len(reasons) == len(nowhere)
    assert_names(reasons[0], "at", "missing", "table.split_time")
    assert_names(capsys.readouterr().err, f"{len(nowhere)} rows", "no split", "'at'")


@pytest.mark.parametrize(
    ("role", "shown"),
    [
        ("label=outcome == yes", "'No', 'Yes'"),
        ("label=clicks >= 9", "0, 1"),
        ("label=same", "1"),
        ("label=outcome == Yes", ""),
        ("label=clicks", ""),
        ("label=late", ""),
    ],
)
def test_a_label_that_all_rows_share_is_named_with_what_its_column_holds(
    tmp_path, capsys, role, shown
):
    """The last label of `late` differs, and only the footers show it."""
    rows = 60_000
    columns = {
        "outcome": np.resize(["No", "Yes"], rows),
        "clicks": np.resize([0, 1], rows),
        "same": np.ones(rows, np.int64),
        "late": np.arange(rows) == rows // 2,
        "x": np.arange(rows) / 2,
    }
    columns["late"] = columns["late"].astype(np.float32)
    write_rows(tmp_path / "a.parquet", row_group_size=1_000, **columns)
    with BatchLoader(table_of(tmp_path, f"{role};dense=x"), batch_size=1_000):
        said = capsys.readouterr().err
    name = role.removeprefix("label=").split()[0]
    expected = f"in all of 20,000 examined rows, and a model learns nothing from one label; column {name!r} holds for"
    assert (expected in said) == bool(shown)
    assert shown in said


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 1e40, "a", decimal.Decimal(1)])
@pytest.mark.parametrize("named", [True, False])
def test_a_fill_that_is_no_number_of_a_batch_is_refused_at_once(tmp_path, named, fill):
    path = write(tmp_path, "a", rows=2_000, x=pa.array([1.5, None] * 1_000))
    with raises(ColumnError, "fill", "'x'", repr(fill)):
        BatchLoader(
            path, roles="label=y;dense=x", batch_size=500, fill={"x": fill} if named else fill
        )


def test_an_embedding_has_a_row_for_the_id_that_stands_for_a_missing_one(tmp_path):
    items = pa.array([1, 2, 3, None] * 500, pa.int32())
    path = write(tmp_path, "a", rows=2_000, x=np.arange(2_000) / 2, item=items)
    with BatchLoader(
        path, roles="label=y;dense=x;sparse=item", batch_size=500, fill={"item": 300}
    ) as loader:
        assert max(int(batch.values.max()) for batch in loader) == 300
        assert loader.cardinalities == {"item": 301}
