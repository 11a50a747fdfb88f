"""Plain Parquet as it is: every column of a click log has a role, by names or by a spec."""

import datetime
import decimal
import json
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.read.parquet_files import ParquetError, table_of
from sluice.tools import guess
from tests.etl.jobs import build_table
from tests.etl.jobs import rows_of as rows_of_table
from tests.etl.tables import write_rows
from tests.open_loader import first_batch, open_loader
from tests.product import (
    BatchLoader,
    ColumnError,
    Hash,
    ParquetFiles,
    QuarantineError,
    SourceError,
    Spec,
    guessed_spec,
)
from tests.raises import MISTAKES, assert_names, raises

pytestmark = pytest.mark.slow

ROWS, FILES = 600, 2
FIRST = datetime.datetime(2024, 1, 1)


def log(number: np.ndarray) -> pa.Table:
    """A click log as services write it. The `score` of row n is n."""
    return pa.table(
        {
            "clicked": pa.array(number * 48_271 % 65_537 % 3 == 0),  # no other column tells it
            "user_id": pa.array((number % 50) * 10**15 - 7 * 10**15, pa.int64()),
            "country": pa.array([[None, "de", "fr"][n % 3] for n in number]).dictionary_encode(),
            "price": pa.array(
                [None if n % 7 == 0 else decimal.Decimal(int(n)) / 4 for n in number],
                pa.decimal128(12, 2),
            ),
            "score": pa.array(number, pa.float64()),
            "is_new": pa.array([None if n % 11 == 0 else n % 2 == 0 for n in number], pa.bool_()),
            "ts": pa.array(
                [FIRST + datetime.timedelta(minutes=int(n) * 7) for n in number], pa.timestamp("ms")
            ),
            "day": pa.array([FIRST.date() + datetime.timedelta(days=int(n) % 9) for n in number]),
            "items": pa.array([list(range(n, n + n % 4)) for n in number], pa.list_(pa.int64())),
            "tags": pa.array(
                [[f"t{k}" for k in range(n % 3)] for n in number], pa.list_(pa.string())
            ),
            "device": pa.array(
                [
                    {"os": "ios" if n % 2 else "web", "size": {"width": int(n) % 900}}
                    if n % 5
                    else None
                    for n in number
                ]
            ),
            "blob": pa.array([b"x"] * len(number)),
        }
    )


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    for part in range(FILES):
        pq.write_table(
            log(np.arange(ROWS) + part * ROWS), folder / f"part-{part}.parquet", row_group_size=130
        )
    return folder


SPEC = """
[input]
format = "parquet"
columns = ["clicked:int", "user_id:int", "country:text", "price:float", "score:float", "is_new:int", "ts:float",
           "day:float", "items:texts", "tags:texts", "device.os:text", "device.size.width:int"]

[table]
split_by = "user_id"
split = {train = 0.7, test = 0.3}

[[column]]
name = "clicked"
role = "label"

[[column]]
name = "score"
role = "dense"
ops = [{op = "fill"}]

[[column]]
name = "price"
role = "dense"
ops = [{op = "fill", value = -1}, {op = "log", shift = 3}]

[[column]]
name = "is_new"
role = "dense"
ops = [{op = "fill", value = 0.5}]

[[column]]
name = "user_id"
role = "sparse"
ops = [{op = "hash", size = 1000}]

[[column]]
name = "country"
role = "sparse"
ops = [{op = "hash", size = 50}]

[[column]]
name = "hour"
from = "ts"
role = "sparse"
ops = [{op = "hour"}, {op = "modulus", size = 24}]

[[column]]
name = "weekday"
from = "day"
role = "sparse"
ops = [{op = "weekday"}, {op = "modulus", size = 7}]

[[column]]
name = "price_band"
from = "price"
role = "sparse"
ops = [{op = "bucketize", boundaries = [10, 100]}]

[[column]]
name = "os"
from = "device.os"
role = "sparse"
ops = [{op = "map", values = ["web"], to = ["browser"]}, {op = "hash", size = 10}]

[[column]]
name = "width"
from = "device.size.width"
role = "sparse"
ops = [{op = "modulus", size = 900}]

[[column]]
name = "user_in_country"
from = ["user_id", "country"]
role = "sparse"
ops = [{op = "cross", size = 5000}]

[[column]]
name = "items"
role = "id_list"
ops = [{op = "first_x", size = 2}, {op = "hash", size = 100}]

[[column]]
name = "tags"
role = "id_list"
ops = [{op = "hash", size = 100}]
"""


def rows_of(source, split: str, **options) -> dict[int, tuple]:
    """Each row by its `score`: label, dense values, ids, and bags."""
    rows = {}
    with open_loader(
        source, batch_size=32, split=split, **{"last": "pad", "reader": "arrow"} | options
    ) as loader:
        for batch in loader:
            columns = {
                name: np.split(column.values, np.cumsum(column.lengths)[:-1])
                if isinstance(column, tuple)
                else column
                for name, column in batch.numpy().items()
            }
            for row in np.flatnonzero(columns.pop("weight")):
                rows[int(columns["score"][row])] = tuple(
                    (
                        name,
                        tuple(values[row].tolist())
                        if isinstance(values, list)
                        else values[row].item(),
                    )
                    for name, values in sorted(columns.items())
                )
    return rows


def test_a_spec_gives_the_loader_the_rows_that_a_job_makes_of_it(clicks, tmp_path):
    """Ids, numbers, bags and splits, column by column: two ways to one feature."""
    table = build_table(None, tmp_path / "table", clicks, text=SPEC)
    plain = ParquetFiles.open(clicks, spec=Spec.own(SPEC))
    seen = Counter()
    for split in ("train", "test"):
        expected, made = rows_of(table, split), rows_of(plain, split)
        assert made == expected
        seen.update(expected.keys())
    assert seen == Counter(range(ROWS * FILES)), "each row lies in one split"
    assert {f.name: f.cardinality for f in plain.fields} == {
        f.name: f.cardinality for f in table.fields
    }


def test_roles_take_any_type_of_column(clicks):
    roles = "label=clicked;dense=score,price,is_new;sparse=device.os%10,user_id%1000,country%50,tags%20,items"
    with open_loader(
        table_of(clicks, roles), batch_size=40, fill=0, shuffle=False, streams=1
    ) as loader:
        assert loader.dense_names == ("score", "price", "is_new"), "in the order asked for"
        assert loader.sparse_names == ("device.os", "user_id", "country", "tags", "items")
        assert loader.cardinalities == {
            "device.os": 12,
            "user_id": 1002,
            "country": 52,
            "tags": 22,
            "items": 1202,
        }
        batch = next(iter(loader))
        rows = log(np.arange(40))
        assert batch["price"].tolist() == [float(p or 0) for p in rows["price"].to_pylist()]
        assert batch["is_new"].tolist() == [float(cell or 0) for cell in rows["is_new"].to_pylist()]
        assert batch.label.tolist() == [float(cell) for cell in rows["clicked"].to_pylist()]
        systems = pa.array(
            [device and device["os"] for device in rows["device"].to_pylist()], pa.string()
        )
        assert batch["device.os"].tolist() == Hash(size=10).apply(systems, None).to_pylist()
        assert batch["items"].lengths.tolist() == [n % 4 for n in range(40)], (
            "a list in the role sparse is a bag"
        )


@pytest.mark.parametrize(
    ("roles", "facts"),
    MISTAKES["roles"],
)
def test_roles_that_cannot_be_are_refused(clicks, roles, facts):
    with raises(ParquetError, *facts):
        table_of(clicks, roles)


def test_a_time_is_refused_with_the_way_to_make_it_a_feature(clicks):
    with pytest.raises(ColumnError, match=r"'ts' holds timestamp.*`sluice guess` writes a spec"):
        BatchLoader(table_of(clicks, "label=clicked;dense=score,ts"), batch_size=32)


def test_an_exact_name_beats_a_pattern(clicks):
    fields = {
        f.name: f.role
        for f in ParquetFiles.open(clicks, "dense=s*;label=clicked;sparse=device.*%10").fields
    }
    assert fields == {
        "score": "dense",
        "clicked": "label",
        "device.os": "sparse",
        "device.size.width": "sparse",
    }
    assert ParquetFiles.open(
        clicks, {"dense": ["score"], "label": "clicked", "sparse": "[cst]o*%9"}
    ).hash == {"country": 9}


def test_columns_without_a_role_are_named_once(clicks, capsys):
    for _ in range(2):
        ParquetFiles.open(
            str(clicks),
            "label=clicked;dense=score,price,is_new;sparse=*_id%9,country%9,tags%9,items",
        )
    said = capsys.readouterr().err
    assert said.count("left out: ts, day, device.os, device.size.width, blob\n") == 1


@pytest.mark.parametrize(
    ("roles", "facts"),
    [
        ("label=clicked;dense=price", ("'price'", "19 empty", "fill={'price': 0}")),
        (
            "label=clicked;dense=score;sparse=user_id",
            ("row 0", "'user_id'", -7 * 10**15, "int32", "hash={'user_id': 1_000_000}"),
        ),
    ],
)
def test_values_are_looked_at_before_the_first_batch(clicks, roles, facts):
    with raises(ColumnError, "part-0.parquet", "row group 0", *facts):
        BatchLoader(table_of(clicks, roles), batch_size=32)


class TestSpecs:
    def changed(self, clicks, *changes, split="train"):
        text = SPEC
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        return BatchLoader(
            table_of(clicks, spec=Spec.own(text, "mine.toml")), batch_size=32, split=split
        )

    @pytest.mark.parametrize(
        ("old", "new", "facts"),
        MISTAKES["only_a_job"],
    )
    def test_what_only_a_job_can_do_is_refused(self, clicks, old, new, facts):
        changes = [(old, new)]
        if "dya" in new:
            changes.append(('from = "day"', 'from = "dya"'))
        with raises(ColumnError, *facts):
            self.changed(clicks, *changes)

    def test_a_split_that_is_not_there_is_refused(self, clicks):
        with pytest.raises(ColumnError, match=r"table.split has no 'tset' .did you mean 'test'"):
            self.changed(clicks, split="tset")

    def test_a_label_is_0_or_1(self, clicks):
        others = [
            ('split_by = "user_id"\nsplit = {train = 0.7, test = 0.3}', "split = {train = 1}"),
            ('["user_id", "country"]', '["is_new", "country"]'),
            ('name = "user_id"', 'name = "user_id"\nfrom = "is_new"'),
        ]
        label = ('name = "clicked"', 'name = "clicked"\nfrom = "user_id"')
        with (
            self.changed(clicks, *others, label) as loader,
            raises(ColumnError, "part-1.parquet", "row group", "'user_id'", "label"),
        ):
            next(iter(loader))

    def test_a_split_by_time_reads_only_the_row_groups_on_the_bound(self, clicks, monkeypatch):
        bound = int((FIRST - datetime.datetime(1970, 1, 1)).total_seconds()) + 7 * 60 * 300
        by_time = [
            (
                'split_by = "user_id"\nsplit = {train = 0.7, test = 0.3}',
                f'split_time = "ts"\nsplit = {{train = 0, test = {bound}}}',
            )
        ]
        read = []
        original = pq.ParquetFile.read_row_group
        monkeypatch.setattr(
            pq.ParquetFile,
            "read_row_group",
            lambda *args, **more: read.append(args[1]) or original(*args, **more),
        )
        with self.changed(clicks, *by_time) as loader:
            assert loader.plan.rows == 300
            assert read == [2], "rows 260 to 389"
        with self.changed(clicks, *by_time, split="test") as loader:
            assert loader.plan.rows == ROWS * FILES - 300

    def test_the_pages_example_loads(self, clicks, repo):
        page = (repo / "docs" / "loader.md").read_text()
        (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
        with BatchLoader(
            table_of(clicks, spec=Spec.own(text)), batch_size=32, split="test"
        ) as loader:
            assert loader.sparse_names == ("price_band", "hour")
            assert next(iter(loader)).values.max() < 26

    def test_another_spec_is_another_version(self, clicks):
        versions = {
            ParquetFiles.open(clicks, spec=Spec.own(text)).version
            for text in (
                SPEC,
                SPEC.replace("size = 50", "size = 51"),
                SPEC.replace("train = 0.7, test = 0.3", "train = 0.6, test = 0.4"),
            )
        }
        assert len(versions) == 3


RATED = """
[input]
format = "parquet"
columns = ["score:int", "country:text", "user_id:int"]
[table]
split = {{all = 1}}
[[column]]
name = "liked"
from = "{source}"
role = "label"
ops = [{ops}]
[[column]]
name = "{feature}"
role = "sparse"
ops = [{{op = "hash", size = 100}}]
[[column]]
name = "score"
role = "dense"
ops = [{{op = "fill"}}]
"""


@pytest.mark.parametrize(
    ("asked", "ops", "label_of"),
    [
        ("user_id >= 0", '{op = "compare", to = ">= 0"}', lambda n: n % 50 >= 7),
        (
            "country == de",
            '{op = "lower"}, {op = "one_hot", values = ["de"]}',
            lambda n: (None, 1, 0)[n % 3],
        ),
    ],
)
def test_a_comparison_makes_the_label_by_roles_by_a_guess_by_a_spec_and_by_a_job(
    clicks, tmp_path, asked, ops, label_of
):
    source = asked.split()[0]
    labels = {n: label_of(n) for n in range(ROWS * FILES)}
    expected = {n: float(label) for n, label in labels.items() if label is not None}
    feature = "country" if source == "user_id" else "user_id"
    text = RATED.format(source=source, ops=ops, feature=feature)
    text = text.replace("[table]", '[table]\nunlabelled = "ask"')
    table = build_table(None, tmp_path / "table", clicks, text=text)
    for files in (table, ParquetFiles.open(clicks, spec=Spec.own(text))):
        made = rows_of(files, "all")
        assert {n: dict(row)["liked"] for n, row in made.items()} == expected
    files = table_of(clicks, f"label={asked};dense=score")
    if len(expected) < ROWS * FILES:
        with raises((ColumnError, SourceError, QuarantineError), f"'{source}'", "empty values"):
            rows_of(files, "train")
    else:
        made = rows_of(files, "train")
        assert {n: dict(row)[source] for n, row in made.items()} == expected
    files = ParquetFiles.open(clicks, spec=Spec.own(guessed_spec(str(clicks), asked)))
    with open_loader(files, batch_size=1, split="test", shuffle=False, streams=1) as loader:
        made = [batch.label.item() for batch in loader]
    assert made == list(expected.values())[-len(made) :], "the last by time"


def test_the_rows_that_have_a_label_stay_and_a_sample_goes_by_what_was_compared(clicks, tmp_path):
    text = RATED.format(source="score", ops='{op = "compare", to = "< 300"}', feature="user_id") + (
        "[sample]\nnegatives = 0.5\nweight = 'w'\n"
    )
    text = text.replace('role = "dense"\nops = [{op = "fill"}]', 'role = "time"')
    rows = rows_of_table(build_table(None, tmp_path / "table", clicks, text=text))
    positive = [row for row in rows if row["liked"]]
    assert sorted(row["score"] for row in positive) == list(range(300))
    assert 350 < len(rows) - len(positive) < 550, "about half of the other 900"
    assert {(row["liked"], row["w"]) for row in rows} == {(1, 1.0), (0, 2.0)}


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_label_of_texts_is_asked_for_by_the_comparison_that_makes_it(tmp_path, kind):
    write_rows(tmp_path / "a.parquet", bought=pa.array(["no", "yes"] * 8).cast(kind), x=[1.0] * 16)
    for asked in (
        lambda: guessed_spec(tmp_path, "bought"),
        lambda: table_of(tmp_path, "label=bought"),
    ):
        with raises(ParquetError, "'bought'", "no, yes", "sluice guess --label 'bought == yes'"):
            asked()
    assert Spec.own(guessed_spec(tmp_path, "bought == yes")).label == "bought"
    write_rows(tmp_path / "a.parquet", user=pa.array(["u1", "u7"] * 8).cast(kind), x=[1.0] * 16)
    spec = Spec.own(guessed_spec(tmp_path, "user == u7"))
    assert (spec.label, spec.table.split_by) == ("user", ("x",)), "not by its own label"


def as_stored(spec: str) -> str:
    """A guessed spec without its scales, as these tests find rows by their numbers."""
    return re.sub(r", \{op = \"scale\", minus[^}]*\}", "", spec)


def first_of_guess(files, spec: str, rows: int = 4):
    """The first rows of files, as they lie, whatever split a guess put them in."""
    spec = re.sub(r"(?m)^split(_\w+)? = .*$", "", as_stored(spec))
    spec = Spec.own(spec.replace("[table]", "[table]\nsplit = {train = 1}"), "guessed")
    return first_batch(table_of(files, spec=spec), rows)


class TestGuesses:
    def test_the_guessed_spec_is_taken_by_loader_and_job(self, clicks, tmp_path):
        out = tmp_path / "guessed.toml"
        guess.main([str(clicks), "--out", str(out)])
        spec = Spec.read(out)
        assert spec.table.split_time == "ts"
        roles = {column.name: column.role for column in spec.columns}
        assert roles == {
            "clicked": "label",
            "price": "dense",
            "score": "dense",
            "is_new": "dense",
            "user_id": "sparse",
            "country": "sparse",
            "ts_hour": "sparse",
            "ts_weekday": "sparse",
            "day_weekday": "sparse",
            "device_os": "sparse",
            "device_size_width": "dense",
            "items": "id_list",
            "tags": "id_list",
        }
        assert {column.sources for column in spec.columns if column.name == "device_os"} == {
            ("device.os",)
        }
        assert "blob: binary" in out.read_text()
        text = as_stored(out.read_text())
        table = build_table(None, tmp_path / "table", clicks, text=text)
        plain = ParquetFiles.open(clicks, spec=Spec.own(text))
        assert rows_of(table, "test") == rows_of(plain, "test")

    def test_a_loader_by_itself_takes_texts_and_fills_what_is_missing(self, clicks, capsys):
        with open_loader(clicks, batch_size=40, shuffle=False, streams=1) as loader:
            assert set(loader.dense_names) == {"price", "score", "is_new", "device.size.width"}
            assert set(loader.sparse_names) == {"user_id", "country", "device.os", "items", "tags"}
            assert next(iter(loader))["price"][0] == 0
        assert_names(
            capsys.readouterr().err,
            "country%1000",
            "price, is_new, device.size.width become 0",
            "left out: ts (a time), day (a time), blob (binary)",
        )

    def test_what_is_no_number_among_floats_is_filled_as_a_spec_fills_it(self, tmp_path, capsys):
        values = pa.array([1.0, np.nan, np.inf, 4.0, None, -np.inf, 7.0, 8.0], pa.float32())
        path = tmp_path / "a.parquet"
        weight = [np.nan, None, *[2.0] * 6]
        write_rows(path, y=[0, 1] * 4, none=[2.0] * 8, x=values, weight=weight)
        batch = first_batch(path, 8)
        assert batch["x"].tolist() == [1, 0, 0, 4, 0, 0, 7, 8]
        assert batch["none"].tolist() == [2] * 8
        assert batch.weight.tolist() == [0, 0, *[2] * 6]
        assert_names(capsys.readouterr().err, "weight: weight", "x, weight become 0")
        roles = {"label": "y", "dense": ["x"]}
        batch = first_batch(path, 8, fill={"x": -1}, roles=roles)
        assert batch["x"].tolist() == [1, -1, -1, 4, -1, -1, 7, 8]

    def test_text_that_names_rows_is_left_out(self, tmp_path):
        rows = range(2000)
        columns = {
            "y": [n * 48_271 % 65_537 % 2 for n in rows],
            "event": [f"e{n}" for n in rows],
            "site": [f"s{n % 30}" for n in rows],
        }
        write_rows(tmp_path / "a.parquet", **columns)
        text = guessed_spec(tmp_path)
        assert "#   event: text" in text
        spec = Spec.own(text)
        assert [(column.name, column.role) for column in spec.columns] == [
            ("y", "label"),
            ("site", "sparse"),
        ]
        assert spec.table.split_by == ("site",)
        assert spec.table.split == {"train": 0.8, "validation": 0.1, "test": 0.1}

    def test_columns_that_are_not_the_same_in_every_file_are_proposed_as_far_as_they_can_be_loaded(
        self, tmp_path, capsys
    ):
        """Numbers of several types are; a spec also takes what some files lack. What is a number in one file and a list
        in another is not."""
        first = {"price": [1, 2], "site": ["a", "b"], "odd": [1, 2]}
        second = {"price": [1.5, 2.0], "shop": ["a", "b"], "odd": [[1], [2]]}
        for part, more in enumerate((first, second)):
            rows = pa.table({"y": [0, 1], "user_id": [1, 2], **more})
            pq.write_table(rows, tmp_path / f"{part}.parquet")
        with open_loader(str(tmp_path), batch_size=4) as loader:
            assert (loader.dense_names, loader.sparse_names) == (("price",), ("user_id",))
        said = capsys.readouterr().err
        assert_names(said, "left out: odd (of several types), site (not in every file", "shop (")
        assert said.count("left out") == 1
        guess.main([str(tmp_path / "0.parquet"), str(tmp_path / "1.parquet")])
        spec, said = capsys.readouterr()
        assert_names(spec, 'optional = ["site", "shop"]\n# Left out:\n#   odd: of several types\n')
        assert_names(spec, "# double, 1 to 2", "# string, not in every file")
        assert not said, "the spec says it"
        batch = first_of_guess(tmp_path, spec)
        assert batch["price"].tolist() == [1, 2, 1.5, 2]
        assert (batch["site"][2:].tolist(), batch["shop"][:2].tolist()) == ([1, 1], [1, 1]), (
            "null where it is missing"
        )

    def test_types_that_only_differ_by_their_writer_are_read_together(self, tmp_path, capsys):
        """delta-rs names the elements of lists `item` in one commit and `element` in the next. Polars writes large
        texts, and pandas writes a dictionary with as many bits as each file needs."""
        elements = pa.field("element", pa.large_string(), nullable=False)
        kinds = (
            (pa.list_(pa.string()), pa.string(), "ms"),
            (pa.list_(pa.field("element", pa.string())), pa.large_string(), "us"),
            (pa.large_list(elements), pa.dictionary(pa.int8(), pa.string()), "ns"),
        )
        for part, (kind, text, at) in enumerate(kinds):
            rows = {
                "y": [0, 1],
                "site": pa.array(["k", "l"], text),
                "tags": pa.array([["a", "b"], []], kind),
                "at": pa.array([FIRST, FIRST], pa.timestamp(at)),
            }
            write_rows(tmp_path / f"{part}.parquet", **rows)
        guessed = first_batch(str(tmp_path), 6)
        assert "several types" not in capsys.readouterr().err
        spec = guessed_spec(tmp_path, "y")
        assert_names(spec, "tags:texts", "site:text", "at:float")
        assert "Left out" not in spec
        for batch in (guessed, first_of_guess(tmp_path, spec, 6)):
            assert batch["tags"].lengths.tolist() == [2, 0] * 3
            assert batch["tags"].values.tolist() == guessed["tags"].values[:2].tolist() * 3
            assert batch["site"].tolist() == guessed["site"][:2].tolist() * 3

    @pytest.mark.parametrize(
        ("texts", "formats"),
        [
            (["2025-03-01", None, ""], "%Y-%m-%d"),
            (["2025-03-01T10:20:00Z", "2025-03-31T00:00:00Z"], "%Y-%m-%dT%H:%M:%SZ"),
            (["01/03/2025 10:20", "31/03/2025 00:10"], "%d/%m/%Y %H:%M"),
            (["2025-03-01", "soon"], ""),
            (["10", "20"], ""),
            (
                ["01.03.2025", "2025-03-01 10:20:00", "02.03.2025"],
                ["%d.%m.%Y", "%Y-%m-%d %H:%M:%S"],
            ),
            (
                ["2025-03-01T10:20:00.25+00:00", "2025-03-01T10:20:00+00:00"],
                ["%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%dT%H:%M:%S.%f%z"],
            ),
            (["13/01/2025", "01/13/2025"], ""),
        ],
    )
    def test_times_as_text_are_proposed_with_the_format_that_reads_them(
        self, tmp_path, capsys, texts, formats
    ):
        columns = {"y": [0, 1, 0][: len(texts)], "x": [0.5] * len(texts), "at": texts}
        said = json.dumps(formats)
        write_rows(tmp_path / "a.parquet", **columns)
        with open_loader(str(tmp_path), batch_size=1, streams=1):
            assert ("left out: at (a time as text)" in capsys.readouterr().err) is bool(formats)
        text = guessed_spec(tmp_path)
        proposed = f'{{op = "parse_time", format = {said}}}, {{op = "weekday"}}'
        assert (proposed in text) is bool(formats)
        assert ('name = "at_hour"' in text) is ("%H" in said)
        ids = first_of_guess(tmp_path, text, len(texts))["at_weekday" if formats else "at"].tolist()
        missing = [bool(formats) and not text for text in texts]
        assert [number == 1 for number in ids] == missing  # 1 is what is missing

    @pytest.mark.parametrize("roles", ["label=bought", {"label": ["bought"]}])
    def test_with_the_label_named_alone_the_rest_is_guessed(self, tmp_path, capsys, roles):
        columns = {
            "bought": [0, 1, 1, 0],
            "x": [1.0, None, 3.0, 4.0],
            "u": ["a", "b", "a", None],
            "at": pa.array([FIRST] * 4, pa.timestamp("s", "Asia/Tokyo")),
        }
        write_rows(tmp_path / "a.parquet", **columns)
        with raises(ParquetError, "roles=", "--label", "bought, x"):
            open_loader(str(tmp_path), batch_size=4)
        with open_loader(str(tmp_path), batch_size=4, roles=roles, shuffle=False) as loader:
            assert (loader.dense_names, loader.sparse_names) == (("x",), ("u",))
        facts = ("label: bought", "dense: x", "sparse: u%1000", "x become 0")
        assert_names(capsys.readouterr().err, *facts)
        for label in ("bougt", "bougt == s3", "bougt >= 4"):
            for options in ({}, {"hash": {"u": 10}}):
                with raises(ParquetError, "no column 'bougt'", "'bought'"):
                    open_loader(str(tmp_path), batch_size=4, roles=f"label={label}", **options)
        with raises(ParquetError, "no column 'site'", "columns: bought, x, u"):
            guessed_spec(str(tmp_path), "site == s3")
        with open_loader(table_of(tmp_path, roles, hash={"u": 10}), batch_size=4) as loader:
            assert loader.dense_names == (), "who hashes has chosen"
        assert '{op = "hour", zone = "Asia/Tokyo"}' in guessed_spec(tmp_path, "bought")

    @pytest.mark.parametrize("asked", [None, "rating"])
    def test_a_rating_becomes_a_label_by_a_comparison(self, tmp_path, asked):
        """About half of the rows are positive."""
        rows = {"rating": [1, 5, 3, 4], "x": [1.0, 2.0, 3.0, 4.0]}
        write_rows(tmp_path / "a.parquet", **rows)
        assert first_of_guess(tmp_path, guessed_spec(tmp_path, asked)).label.tolist() == [
            0,
            1,
            0,
            1,
        ]
