"""`sluice.petastorm`: Petastorm's doors, with our loader behind them: exact, resumable, tuned."""

import datetime
import inspect
import itertools
import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.ingest.read.petastorm.row_groups import RowGroupError
from sluice.petastorm import NGram, TransformSpec, make_reader, make_spark_converter
from tests.etl.tables import write_rows
from tests.product import PetastormError, SourceError, UsageError, make_batch_reader
from tests.raises import raises

pytestmark = pytest.mark.slow

ROWS, GROUP = 90, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three files of three row groups, with columns of many types, and names that are passed over."""
    folder = tmp_path_factory.mktemp("data")
    for part in range(3):
        rows = np.arange(part * 30, part * 30 + 30)
        table = pa.table(
            {
                "id": rows,
                "half": (rows / 2).astype(np.float32),
                "name": [f"row {n}" for n in rows],
                "pair": [[n, -n] for n in rows.tolist()],
                "day": [datetime.date(2026, 1, 1) + datetime.timedelta(int(n)) for n in rows],
                "at": pa.array(rows * 10**6, pa.timestamp("us")),
            }
        )
        pq.write_table(table, folder / f"part-{part}.parquet", row_group_size=GROUP)
    (folder / "_SUCCESS").write_text("")
    (folder / ".hidden").write_text("no Parquet")
    return f"file://{folder}"


def ids(reader) -> list[list[int]]:
    return [batch.id.tolist() for batch in reader]


def test_batches_are_row_groups_with_every_type(folder):
    with make_batch_reader(folder, shuffle_row_groups=False) as reader:
        batches = list(reader)
        assert reader.last_row_consumed
    assert [b.id.tolist() for b in batches] == [
        list(range(n, n + GROUP)) for n in range(0, ROWS, GROUP)
    ]
    first = batches[0]
    assert set(first._fields) == {"id", "half", "name", "pair", "day", "at"}
    assert (first.half.dtype, first.half[3]) == (np.float32, 1.5)
    assert first.name.tolist() == [f"row {n}" for n in range(GROUP)]
    assert first.pair.tolist() == [[n, -n] for n in range(GROUP)]
    assert first.day[2] == datetime.date(2026, 1, 3)
    assert first.at[7] == np.datetime64(7, "s")


def test_the_order_follows_from_files_seed_and_epoch_alone(folder):
    with make_batch_reader(folder, num_epochs=2, seed=4, workers_count=1) as reader:
        whole = ids(reader)
    assert (
        sorted(itertools.chain(*whole[:9]))
        == sorted(itertools.chain(*whole[9:]))
        == list(range(ROWS))
    )
    assert whole[:9] != whole[9:], "each epoch has an order of its own"
    with make_batch_reader(folder, num_epochs=2, seed=4, workers_count=7) as reader:
        assert ids(reader) == whole
    with make_batch_reader(folder, num_epochs=2, seed=5) as reader:
        assert ids(reader) != whole
    with make_batch_reader(folder, num_epochs=2, seed=4, shuffle_rows=True) as reader:
        mixed = ids(reader)
    assert [sorted(batch) for batch in mixed] == whole
    assert mixed != whole


@pytest.mark.parametrize("done", [0, 4, 9, 18])
def test_a_reader_goes_on_where_another_one_was(folder, done):
    with make_batch_reader(folder, num_epochs=2, seed=1, shuffle_rows=True) as reader:
        whole = ids(reader)
    with make_batch_reader(folder, num_epochs=2, seed=1, shuffle_rows=True) as reader:
        for _ in range(done):
            next(reader)
        state = json.loads(json.dumps(reader.state_dict()))
    with make_batch_reader(
        folder, num_epochs=2, seed=1, shuffle_rows=True, workers_count=1
    ) as reader:
        reader.load_state_dict(state)
        assert ids(reader) == whole[done:]
    with (
        make_batch_reader(folder, seed=2) as reader,
        raises(
            RowGroupError, "row groups", "seed: 1", "2 here", "shuffle_rows: True", "False here"
        ),
    ):
        reader.load_state_dict(state)


def test_shards_share_all_row_groups(folder):
    from petastorm.errors import NoDataAvailableError

    shards = []
    for shard in range(4):
        with make_batch_reader(folder, cur_shard=shard, shard_count=4, seed=3) as reader:
            shards.append(ids(reader))
    assert sorted(itertools.chain(*itertools.chain(*shards))) == list(range(ROWS))
    assert [len(shard) for shard in shards] == [3, 2, 2, 2]
    with pytest.raises(NoDataAvailableError):
        make_batch_reader(folder, cur_shard=0, shard_count=10)


def test_columns_predicates_and_transforms_are_petastorms(folder):
    from petastorm.predicates import in_lambda

    with make_batch_reader(folder, schema_fields=["id", "na.*"]) as reader:
        assert set(next(reader)._fields) == {"id", "name"}
    with pytest.raises(
        RuntimeError, match=r"No fields matching the criteria '\['nothing'\]' were found"
    ):
        make_batch_reader(folder, schema_fields=["nothing"])

    def function(frame):
        frame["twice"] = frame["id"] * 2
        return frame[frame["id"] % 2 == 0]  # a row group may have other rows here: it comes whole

    spec = TransformSpec(
        function, edit_fields=[("twice", np.int64, (), False)], removed_fields=["half"]
    )
    odd = in_lambda(["id"], lambda id: (id >= 20) & (id < 34))
    with make_batch_reader(
        folder,
        schema_fields=["id", "half"],
        transform_spec=spec,
        predicate=odd,
        shuffle_row_groups=False,
    ) as reader:
        batches = list(reader)
    assert [b.id.tolist() for b in batches] == [[20, 22, 24, 26, 28], [30, 32]]
    assert [b.twice.tolist() for b in batches] == [[40, 44, 48, 52, 56], [60, 64]]
    assert set(batches[0]._fields) == {"id", "twice"}


@pytest.mark.parametrize("lists", [[[1], [2, 3]], [[1], None]])
def test_lists_that_make_no_array_are_refused_by_column_and_file(tmp_path, lists):
    write_rows(tmp_path / "a.parquet", id=[1, 2], seen=lists)
    facts = "a.parquet, row group 0", "'seen'", "schema_fields"
    with make_batch_reader(f"file://{tmp_path}") as reader, raises(SourceError, *facts):
        next(reader)
    with make_batch_reader(f"file://{tmp_path}", schema_fields=["id"]) as reader:
        assert next(reader).id.tolist() == [1, 2]


def test_it_is_tuned_and_leaves_a_record(folder, tmp_path):
    with make_batch_reader(folder, num_epochs=None, run_dir=tmp_path / "run") as reader:
        assert len(list(itertools.islice(reader, 30))) == 30
        assert reader.tuning.mode in str(reader.tuning)
        assert reader.tuning.stopped is None
    begun = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (begun["reader"], begun["tuning"]) == ("petastorm", reader.tuning.mode)
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["rows"]) == ("end", 30 * GROUP)
    with make_batch_reader(folder, reader_pool_type="dummy", run_dir=tmp_path / "run") as reader:
        assert (reader.tuning.mode, reader.knobs.workers) == ("fixed", {"decode": 1})


def test_a_reader_that_is_left_leaves_nothing_and_says_so(folder):
    before = set(threading.enumerate())
    with make_batch_reader(folder, num_epochs=None) as reader:
        next(reader)
    assert not {t for t in threading.enumerate() if t.is_alive()} - before
    with pytest.raises(RuntimeError, match="Trying to read a sample after this reader has stopped"):
        next(reader)
    reader.stop()
    reader.join()


def test_signatures_are_petastorms(folder):
    import petastorm.reader

    theirs = inspect.signature(petastorm.reader.make_batch_reader).parameters
    ours = inspect.signature(make_batch_reader).parameters
    newest = (
        [*theirs, "convert_early_to_numpy"]
        if "convert_early_to_numpy" not in theirs
        else list(theirs)
    )  # of 0.13
    assert list(ours) == [*newest, "tuning", "run_dir", "memory_limit"]
    assert all(ours[name].default == argument.default for name, argument in theirs.items())
    assert list(inspect.signature(make_spark_converter).parameters) == [
        "df",
        "parquet_row_group_size_bytes",
        "compression_codec",
        "dtype",
    ]


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (
            {"reader_pool_type": "process"},
            ["reader_pool_type='process'", "threads", "transforms of sluice.Loader"],
        ),
        ({"filters": [("day", ">", 2)]}, ["filters=", "predicate", "list of files"]),
        (
            {"transform_spec": TransformSpec(removed_fields=["idd"])},
            ["removed_fields", "'idd'", "'id'"],
        ),
        (
            {"schema_fields": NGram({0: ["id"], 1: ["id"]}, 1, "id")},
            ["NGram", "history=History", "[[history]]", "docs/features.md"],
        ),
        ({"dataset_url_or_urls": "some/folder"}, ["write a URL, for instance file:///"]),
        ({"dataset_url_or_urls": f"file://{__file__}/nothing"}, ["no such file"]),
        ({"rowgroup_selector": object()}, ["rowgroup_selector", "predicate", "list of files"]),
        ({"predicate": "id > 3"}, ["predicate", "'id > 3'", "petastorm.predicates.PredicateBase"]),
    ],
)
def test_what_is_not_supported_or_not_there_is_refused_by_name(folder, options, facts):
    with raises(UsageError, *facts):
        make_batch_reader(**{"dataset_url_or_urls": folder} | options)


def test_the_row_api_and_an_empty_folder_are_refused(folder, tmp_path):
    with raises(PetastormError, "make_reader", "make_batch_reader", "sluice.Loader"):
        make_reader(folder, num_epochs=1)
    with raises(UsageError, "no *.parquet file in this folder"):
        make_batch_reader(f"file://{tmp_path}")


def test_names_of_folders_hold_columns(tmp_path):
    from petastorm.predicates import in_lambda

    for day, place in itertools.product((1, 2), ("se", "no")):
        (tmp_path / f"day={day}" / f"place={place}").mkdir(parents=True)
        write_rows(
            tmp_path / f"day={day}" / f"place={place}" / "part.parquet",
            id=[day * 10 + n for n in range(4)],
        )
    url = f"file://{tmp_path}"
    with make_batch_reader(url, shuffle_row_groups=False) as reader:
        batches = [(b.day.tolist(), b.place.tolist(), b.id.tolist()) for b in reader]
    assert batches[0] == ([1] * 4, ["no"] * 4, [10, 11, 12, 13])
    assert [(day[0], place[0]) for day, place, _ in batches] == [
        (1, "no"),
        (1, "se"),
        (2, "no"),
        (2, "se"),
    ]
    second = in_lambda(["day"], lambda day: day == 2)
    with make_batch_reader(url, predicate=second, schema_fields=["day", "id"]) as reader:
        assert sorted(n for batch in reader for n in batch.id.tolist()) == sorted(
            [20, 21, 22, 23] * 2
        )


@pytest.mark.filterwarnings(
    "ignore:The given NumPy array is not writable"
)  # so are those of Petastorm's own Reader
def test_petastorms_torch_loader_takes_it(folder):
    from petastorm.pytorch import BatchedDataLoader, DataLoader

    fields = ["id", "half"]
    with DataLoader(make_batch_reader(folder, schema_fields=fields), batch_size=30) as loader:
        assert sorted(int(n) for batch in loader for n in batch["id"]) == list(range(ROWS))
    with BatchedDataLoader(
        make_batch_reader(folder, schema_fields=fields), batch_size=30
    ) as loader:
        assert sorted(int(n) for batch in loader for n in batch["id"]) == list(range(ROWS))


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_what_spark_writes_is_read_in_an_exact_order(tmp_path):
    from tests.etl.jobs import session

    spark = session()  # of all tests of this process, so it is not stopped here
    spark.conf.set("petastorm.spark.converter.parentCacheDirUrl", f"file://{tmp_path}")
    converter = make_spark_converter(spark.range(ROWS).repartition(3))
    orders = []
    for _ in range(2):
        with converter.make_torch_dataloader(num_epochs=1, seed=5, shuffle_rows=True) as loader:
            orders.append([int(n) for batch in loader for n in batch["id"]])
    converter.delete()
    assert orders[0] == orders[1] != sorted(orders[0]) == list(range(ROWS))
