"""What `sluice guess` takes columns for: by drawn columns of known kinds, and what tells the label."""

import datetime
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from sluice.ingest.plain.column_kind import is_amount, likely_values, words_of
from sluice.ingest.plain.probe import ColumnFacts
from sluice.ingest.plain.roles import GuessError, ParquetError
from sluice.ingest.read.parquet_files import table_of
from tests.etl.tables import write_rows
from tests.open_loader import first_batch
from tests.product import OWN, Spec, UsageError, guessed_spec, probe, proposals
from tests.raises import assert_names, raises

ROWS = 4000
SEEDS = pytest.mark.parametrize("seed", range(3))


def facts_of(folder, **columns: object) -> dict[str, ColumnFacts]:
    table = pa.table(columns)
    path = write_rows(folder / "a.parquet", table, row_group_size=max(1, table.num_rows // 3))
    return probe({str(path): OWN}, columns)


def clicks(rng: np.random.Generator, rate: float = 0.3) -> np.ndarray:
    return (rng.random(ROWS) < rate).astype(np.int64)


@SEEDS
@pytest.mark.parametrize("missing", ["", "text", "number", "time", "list", "zero"])
def test_a_column_that_is_there_only_with_positive_rows_is_left_out(tmp_path, seed, missing):
    """Also if only half of the positive rows have it. One that is there at random stays, whatever it holds."""
    rng = np.random.default_rng(seed)
    label = clicks(rng, 0.05 + 0.1 * seed)
    there = (label > 0) & (rng.random(ROWS) < 0.5)
    made = {
        "text": ["refund" if is_there else None for is_there in there],
        "number": [1.5 if is_there else None for is_there in there],
        "time": pa.array(
            [10**9 + 7 if is_there else None for is_there in there], pa.timestamp("s")
        ),
        "list": [["a"] if is_there else [] for is_there in there],
        "zero": np.where(there, 17.5, 0.0),
        "": [1.0] * ROWS,
    }
    facts = facts_of(
        tmp_path,
        click=label,
        telling=made[missing],
        other=[None if missing_here else 2.5 for missing_here in rng.random(ROWS) < 0.5],
    )
    proposed = proposals(facts, ROWS)
    assert proposed["other"].role == "dense"
    assert ("only where the label is 1" in proposed["telling"].why) is bool(missing)
    assert bool(proposed["telling"].role) is not bool(missing)


@SEEDS
def test_counts_and_ids_are_distinguished_by_their_shape(tmp_path, seed):
    rng = np.random.default_rng(seed)
    zipf = np.minimum(rng.zipf(1.5, ROWS), 3000)
    columns = {
        "a": np.exp(rng.normal(1, 1, ROWS)).astype(int),
        "b": np.exp(rng.normal(6, 2, ROWS)).astype(int),
        "c": rng.geometric(0.1, ROWS) - 1,
        "d": rng.poisson(0.3, ROWS) * rng.integers(0, 900, ROWS),
        "e": rng.integers(0, 5000, ROWS),
        "f": rng.permutation(5000)[zipf],
        "g": rng.integers(0, 7, ROWS),
        "h": 1000 + rng.integers(0, 300, ROWS),
        "i": np.where(rng.random(ROWS) < 0.9, 1, rng.integers(0, 4000, ROWS)),
        "j": rng.integers(0, 2, ROWS),
    }
    amounts = {
        name for name, facts in facts_of(tmp_path, **columns).items() if is_amount(name, facts)
    }
    assert amounts == {"a", "b", "c", "d", "j"}


@SEEDS
@pytest.mark.parametrize("values", [50, 3_000, 96_000, 10**7])
def test_sizes_fit_what_a_sample_shows_of_all_values(tmp_path, seed, values):
    """A sample of 4,000 rows of ten million: neither its own values alone, nor as many as there are rows."""
    rng, rows = np.random.default_rng(seed), 10**7
    site = [f"v{n}" for n in rng.integers(0, values, ROWS)]
    facts = facts_of(tmp_path, y=[0, 1] * (ROWS // 2), site=site)
    assert facts["site"].distinct <= likely_values(facts["site"], rows) <= rows
    assert values / 4 <= likely_values(facts["site"], rows) <= 3 * values
    size = proposals(facts, rows)["site"].size
    assert size <= (10**7 if values > 96_000 else 2_000_000)


def test_ratings_become_clicks_only_if_nobody_named_them_as_the_label(tmp_path):
    facts = facts_of(tmp_path, x=[1.0, 2.0, 3.0, 4.0], rating=[1, 3, 4, 5])
    assert proposals(facts, 4, "rating")["rating"].label == "rating"
    assert proposals(facts, 4, "rating", is_click=True)["rating"].label.startswith("rating >= ")


def test_labels_are_known_by_their_words(tmp_path):
    for name in ("Click?", "is_clicked", "isClick", "CLICKED", "was_converted", "Label"):
        proposed = proposals(facts_of(tmp_path, x=[1.0, 2.0], **{name: [0, 1]}), 2)
        assert proposed[name].role == "label"
    assert words_of("userId") == words_of("user_id") == ["user", "id"]
    with raises(GuessError, "label, target", "roles=", "--label", "x, label_count"):
        proposals(facts_of(tmp_path, x=[1.0], label_count=[3]), 1)
    with raises(ParquetError, "'clikced'", "did you mean 'clicked'?"):
        proposals(facts_of(tmp_path, x=[1.0], clicked=[1]), 1, "clikced")
    with raises(ParquetError, "'x'", "numbers or texts"):
        proposals(facts_of(tmp_path, x=[datetime.date(2026, 1, 1)]), 1, "x")


@SEEDS
@pytest.mark.parametrize("form", ["%m/%d/%Y", "%d/%m/%Y"])
@pytest.mark.parametrize("is_csv", [False, True])
def test_dates_that_fit_with_day_first_or_month_first_are_read_as_close_together(
    tmp_path, seed, form, is_csv
):
    rng = np.random.default_rng(seed)
    month = int(rng.integers(1, 13))
    days = np.sort(rng.integers(1, 13, ROWS)).tolist()
    times = [datetime.date(2026, month, day).strftime(form) for day in days]
    table = pa.table({"at": times, "n": rng.integers(0, 9, ROWS), "click": clicks(rng)})
    path = tmp_path / ("a.csv" if is_csv else "a.parquet")
    (csv.write_csv if is_csv else pq.write_table)(table, path)
    text = guessed_spec(path)
    assert_names(text, f'format = "{form}"')


@pytest.mark.parametrize(
    ("values", "form"),
    [
        (["14102100", "14103123"], "%y%m%d%H"),
        (["20141021", "20141130"], "%Y%m%d"),
        (["2014102100", "2014113023"], "%Y%m%d%H"),
        (["20141021002359"], "%Y%m%d%H%M%S"),
        (["14102100", "14103224"], ""),
        (["20141021", "20141332"], ""),
        (["1001", "1002"], ""),
    ],
)
def test_times_written_as_whole_numbers(tmp_path, values, form):
    proposal = proposals(
        facts_of(tmp_path, y=[0] * len(values), hour=[int(value) for value in values]), 2
    )["hour"]
    assert proposal.formats == ((form,) if form else ())
    assert (proposal.role == "time") is bool(form)


def test_what_folders_know_is_a_column_and_names_that_no_table_can_have_are_changed(
    tmp_path, capsys
):
    rng = np.random.default_rng(0)
    folder = tmp_path / "logs" / "date=2026-01-01"
    folder.mkdir(parents=True)
    columns = {
        "click": clicks(rng),
        "City": [f"a{n % 7}" for n in range(ROWS)],
        "city": [f"b{n % 5}" for n in range(ROWS)],
        "split": rng.integers(0, 5, ROWS),
        "_x": rng.normal(size=ROWS),
        "user": pa.array([2**64 - 1 - n % 99 for n in range(ROWS)], pa.uint64()),
        "pair": pa.array(rng.integers(0, 50, (ROWS, 2)).tolist(), pa.list_(pa.int64(), 2)),
        "vector": pa.array(rng.normal(size=(ROWS, 2)).tolist(), pa.list_(pa.float32(), 2)),
    }
    write_rows(folder / "a.parquet", **columns)
    text = guessed_spec(tmp_path / "logs")
    assert_names(text, "#   vector:", 'op = "bag"')
    spec = Spec.own(text)
    names = "click City city_2 split_2 x_2 user pair date_weekday"
    assert {column.name for column in spec.columns} == set(names.split())
    assert spec.input.columns["user"] == "text"
    for how in ({"spec": spec}, {}):
        batch = first_batch(table_of(tmp_path / "logs", **how), 100, reader="arrow")
        assert len(set(batch["user"].tolist())) > 30
    assert_names(capsys.readouterr().err, "date (a time as text")


def test_numbers_are_brought_near_0_whatever_their_scale(tmp_path):
    """Counts up to 10 million by their logarithm, years and amounts by mean and deviation, and far outliers are cut."""
    rng = np.random.default_rng(0)
    columns = {
        "views": np.minimum(np.exp(rng.normal(5, 3, ROWS)), 1e7).astype(int),
        "x": rng.normal(2000, 5, ROWS),
        "profit": rng.standard_t(1.5, ROWS) * 1000,
        "same": np.full(ROWS, 3.5),
    }
    write_rows(tmp_path / "a.parquet", click=clicks(rng), **columns)
    spec = Spec.own(guessed_spec(tmp_path))
    views = next(column for column in spec.columns if column.name == "views")
    assert [operator.name for operator in views.ops] == ["fill", "log", "scale"]
    batch = first_batch(table_of(tmp_path, spec=spec), 2000)
    for name in columns:
        values = batch[name].numpy()
        assert abs(values).max() < 25
        assert name == "same" or 0.3 < values.std() < 3


@pytest.mark.parametrize("broken", [1, 20, 1200])
@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_a_few_broken_cells_change_no_guess_and_are_named(tmp_path, broken, form):
    """The same columns and split as without them. With 30 % of broken cells, a column is text."""
    rng = np.random.default_rng(broken)
    wrong: dict[str, object] = {"at": "notadate", "price": "abc", "click": 7}
    if form == "parquet":  # its numbers are numbers
        del wrong["price"]
    if broken > ROWS // 100:
        del wrong["click"]  # then the label is a rating
    path = tmp_path / f"a.{form}"

    def guess(bad: dict[str, list[int]]) -> str:
        rows = {
            "click": clicks(rng).tolist(),
            "user": [f"u{n}" for n in rng.integers(300, size=ROWS)],
            "price": (0.25 + rng.integers(9_000, size=ROWS)).tolist(),
            "at": [f"2026-01-{1 + n // 200:02d} {n % 24:02d}:15:00" for n in range(ROWS)],
        }
        for name, places in bad.items():
            for row in places:
                rows[name][row] = wrong[name]
        cells = list(zip(*rows.values(), strict=True))
        if form == "parquet":
            write_rows(path, **rows)
        elif form == "json":
            path.write_text(
                "\n".join(json.dumps(dict(zip(rows, row, strict=True))) for row in cells)
            )
        else:
            path.write_text("\n".join(",".join(map(str, row)) for row in (rows, *cells)))
        return guessed_spec(str(path))

    clean = Spec.own(guess({}))
    split_time = None if form == "parquet" else "at"
    assert (clean.table.split_time, clean.input.columns["price"]) == (split_time, "float")
    bad = {name: rng.choice(ROWS, broken, replace=False).tolist() for name in wrong}
    text = guess(bad)
    spec = Spec.own(text)
    if broken > ROWS // 100:
        if form != "json":
            assert {spec.input.columns[name] for name in wrong} == {"text"}
            assert "sampled values, such as" not in text
        return
    assert spec.table.split_time == split_time
    roles = [(column.name, column.role) for column in clean.columns]
    assert [(column.name, column.role) for column in spec.columns] == roles
    for name, places in bad.items():
        if (
            form == "parquet" or name == "click"
        ):  # clicks with other numbers reject no line of the sample
            assert_names(text, f"{broken} of {ROWS:,} sampled values, such as", f'"{wrong[name]}"')
            continue
        where = f" ({path}, line {min(places) + 1 + (form == 'csv')})"
        assert_names(
            text, f"{broken} of {ROWS:,} sampled values, such as", f'"{wrong[name]}"{where}'
        )


@pytest.mark.parametrize(
    ("comparison", "note"),
    [("stars >= 1", "# All of these rows get the label 1."), ("stars >= 3", "")],
)
def test_a_guess_says_if_all_rows_get_the_same_label(tmp_path, comparison, note):
    lines = [f"{1 + row % 5},i{row % 7}" for row in range(ROWS)]
    (tmp_path / "a.csv").write_text("\n".join(["stars,item", *lines]))
    text = guessed_spec(str(tmp_path / "a.csv"), comparison)
    assert ("All of these rows get" in text) == bool(note)
    assert note in text


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
@pytest.mark.parametrize("year", [1991, 1997, 2005, 2024])
def test_times_are_recognised_by_their_values_in_files_without_a_header(tmp_path, unit, year):
    """Also popular ids, whose counts fall as those of amounts do."""
    draw = np.random.default_rng(year)
    rows = 8000
    start = int(datetime.datetime(year, 3, 1, tzinfo=datetime.UTC).timestamp())
    times = (start + draw.integers(0, 200 * 86_400, rows)) * unit
    popular = 1 / np.arange(1, 501) ** 0.8
    items = draw.choice(np.arange(1, 501), rows, p=popular / popular.sum())
    counts = (draw.pareto(1.1, rows) * 3).astype(int)
    clicks = draw.integers(0, 2, rows)
    lines = zip(clicks, items, counts, times, strict=True)
    path = tmp_path / "u.data"
    path.write_text("".join("\t".join(map(str, cells)) + "\n" for cells in lines))
    text = guessed_spec(str(path))
    spec = Spec.own(text)
    roles = {column.sources[0]: column.role for column in spec.columns}
    assert roles == dict(column_1="label", column_2="sparse", column_3="dense", column_4="sparse")
    assert spec.table.split_time == "column_4"


def test_a_few_other_numbers_among_clicks_are_errors_and_not_ratings(tmp_path):
    draw = np.random.default_rng(3)
    for odd, rows in ((2, 5000), (-1, 5000), (2, 20)):
        clicks = draw.integers(0, 2, rows)
        clicks[rows // 2] = odd
        text = "".join(f"{click},{n % 7}\n" for n, click in enumerate(clicks))
        (tmp_path / "log.csv").write_text(f"click,item\n{text}")
        guessed = guessed_spec(str(tmp_path / "log.csv"))
        label = Spec.own(guessed).label_column
        if rows == 20:  # one in twenty is no accident
            assert label.ops
            continue
        assert not label.ops
        assert_names(guessed, f'# Neither 0 nor 1: 1 of 5,000 sampled values, such as "{odd}"')


def test_a_boolean_label_needs_no_statistics(tmp_path):
    table = pa.table({"click": [True, False] * 200, "x": [*range(400)]})
    pq.write_table(table, tmp_path / "a.parquet", write_statistics=False)
    assert Spec.own(guessed_spec(tmp_path)).input.columns["click"] == "int"


def test_what_a_spec_cannot_read_is_left_out_with_the_reason(tmp_path):
    path = str(tmp_path / "rows.parquet")
    columns = {
        "click": [n % 3 % 2 for n in range(400)],
        "item_id": pa.array([Decimal(n % 50) for n in range(400)], pa.decimal128(12, 2)),
        "seen": pa.array([[n % 9] for n in range(400)], pa.list_(pa.uint64())),
        "weight": [[0.5]] * 400,
        "visits": [[{"page": 1}], []] * 200,
        "country": [f"c{n % 5}" for n in range(400)],
    }
    write_rows(path, **columns)
    spec = Spec.own(text := guessed_spec(path, exclude=("country",)))
    reasons = ("#   weight: list<element: double>, which a spec cannot read", "#   visits: list<")
    assert_names(text, *reasons, "#   country: by --exclude")
    assert [column.name for column in spec.columns] == ["click", "item_id", "seen"]
    batch = first_batch(table_of(path, spec=spec), 400, last="pad")
    assert len(set(batch.values.tolist())) > 30
    for wrong, fact in (("countri", "country"), ("click", "label")):
        with raises(UsageError, f"--exclude {wrong}", fact):
            guessed_spec(path, exclude=(wrong,))
