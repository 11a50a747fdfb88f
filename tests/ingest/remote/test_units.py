"""A unit of work: the same batches by workers as without them."""

import itertools
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.small_table import small_table
from sluice.etl.table.table import FeatureTable
from sluice.ingest.knobs import Knobs
from sluice.ingest.remote.messages import RemoteError, WrongAnswer, answer, decode, read_answer
from sluice.ingest.remote.worker import open_maker
from tests.ingest import left_ids
from tests.ingest.remote.conftest import job_and_units
from tests.open_loader import open_loader
from tests.product import (
    NOTHING,
    ColumnError,
    FileOpener,
    ParquetFiles,
    SourceError,
    Unit,
    UnitMaker,
)
from tests.raises import raises


def contents(batch):
    parts = (batch.dense, batch.label, batch.weight, batch.values, batch.lengths)
    return [part.numpy().copy() for part in parts]


def hashes(source, epochs=2, **how):
    """The order hash of each epoch, and every value of every batch."""
    order, values = [], []
    with open_loader(source, epochs=epochs, **{"batch_size": 160, **how}) as loader:
        for _ in range(epochs):
            values += map(contents, loader)
            order.append(loader.order_hash)
    return order, values


def same(these, those):
    assert these[0] == those[0]
    assert len(these[1]) == len(those[1])
    for batch, other in zip(these[1], those[1], strict=True):
        for a, b in zip(batch, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "how",
    [
        {"reader": "arrow"},
        {"reader": "petastorm"},
        {"last": "pad", "streams": 2},
        {"rank": 1, "ranks": 2},
        {"knobs": Knobs(workers={"decode": 3}, backend={"decode": "remote"})},
    ],
    ids=lambda how: next(iter(how)) + str(next(iter(how.values()))),
)
def test_remote_workers_give_the_same_batches_bit_by_bit(worker, named, table, how):
    local = {name: value for name, value in how.items() if name != "knobs"}
    same(hashes(table, **how, workers=named(worker)), hashes(table, **local))


def test_a_run_that_is_resumed_and_changes_its_back_end_while_it_runs_goes_on_with_the_same_rows(
    worker, named, table
):
    _, expected = hashes(table, 1, reader="arrow")
    how = {"batch_size": 160, "workers": named(worker), "reader": "arrow"}
    batches, turns = [], itertools.cycle(["thread", "remote"])
    with open_loader(table, **how) as loader:
        for batch in itertools.islice(loader, 7):
            batches.append(contents(batch))
            state, knobs = loader.state_dict(), loader.knobs
            loader.apply(replace(knobs, backend={"decode": next(turns)}))
    with open_loader(table, **how) as loader:
        loader.load_state_dict(state)
        batches += map(contents, loader)
        assert loader.remote["units"] > 0
    same(([], batches), ([], expected))
    with open_loader(table, **how, knobs=Knobs(backend={"decode": "thread"})) as loader:
        same(([], list(map(contents, loader))), ([], expected))
        assert loader.remote["units"] == 0


def test_bags_and_plain_parquet_and_missing_values_come_as_they_do_without_workers(
    serve, named, tmp_path
):
    rows, draw = 3000, np.random.default_rng(3)
    columns = {
        "click": draw.integers(0, 2, rows, np.int8),
        "price": pa.array(draw.random(rows), mask=draw.random(rows) < 0.1),
        "user": [f"u{n}" for n in draw.integers(0, 500, rows)],
        "seen": [draw.integers(0, 99, n).tolist() for n in draw.integers(0, 5, rows)],
    }
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table(columns), path, row_group_size=700)
    roles = {"label": "click", "dense": "price", "sparse": ["user%1000"], "id_list": "seen"}
    how = {"roles": roles, "fill": 0.5}
    server = serve(partial(open_maker, [path], NOTHING), threads=2)
    same(hashes([path], **how, workers=named(server)), hashes([path], **how))


def test_operators_that_a_table_leaves_to_the_loader_work_there_as_they_do_here(
    serve, named, tmp_path
):
    _, left = left_ids.tables(tmp_path, 2000)
    assert any(field.online and field.role == "sparse" for field in left.fields)
    server = serve(lambda job: UnitMaker(job, FeatureTable.open(left.uri)))
    same(hashes(left, fill=0.0, workers=named(server)), hashes(left, fill=0.0))


@pytest.fixture
def asked(table):
    """A job of the small table, who makes its units, and the units of an epoch."""
    job, units = job_and_units(table)
    maker = UnitMaker(job, table)
    yield job, maker, units
    maker.close()


def test_requests_are_read_back_and_nonsense_is_refused(asked):
    job, maker, units = asked
    for unit in units:
        assert Unit.requested(decode(unit.request(job).body)[0]) == (job, unit)
    for text in (
        *(
            "null",
            "[]",
            "{}",
            '"rows"',
            "[0, 0, 0, [[0, 0, 0]]]",
            "[0, 0, 0, [[0, 0, 0, 1, 0, 0]]]",
        ),
        *(
            "[0, -1, 0, []]",
            "[0, 0.5, 0, []]",
            "[0, true, 0, []]",
            "[0, 0, 18446744073709551616, []]",
        ),
    ):
        with pytest.raises(RemoteError):
            Unit.requested({"job": job.values, "unit": json.loads(text)})
    for given in (None, [], {}, {**job.values, "slit": 0}):
        with pytest.raises(RemoteError):
            Unit.requested({"job": given, "unit": [0, 0, 0, []]})
    for unit in (
        Unit(0, 99, 0, ()),
        Unit(0, 0, 99, ()),
        Unit.requested({"job": job.values, "unit": [0, 0, 0, [[0, 0, 0, 9999, 0]]]})[-1],
    ):
        with raises(RemoteError, f"file {unit.file}", f"row group {unit.group}"):
            maker.rows(unit)


def test_another_plan_or_table_is_refused_by_name(asked, table, tmp_path):
    job, _, _ = asked
    with raises(RemoteError, "plan: '0'"):
        UnitMaker(replace(job, plan="0"), table)
    with raises(RemoteError, "made: '0'"):
        UnitMaker(replace(job, made="0"), table)
    other = small_table(tmp_path / "other", rows=5000, files=3, row_group_rows=256, seed=1)
    with raises(RemoteError, other.uri, "files"):
        UnitMaker(job, other)


def plain(folder: Path, seed: int) -> list[str]:
    """Files whose names, sizes and row groups are the same for each seed."""
    folder.mkdir()
    values = np.random.default_rng(seed)
    paths = [str(folder / f"part-{n}.parquet") for n in range(2)]
    for path in paths:
        table = pa.table({"label": pa.array([0, 1] * 200, pa.int8()), "x": values.random(400)})
        how = {"row_group_size": 100, "use_dictionary": False, "compression": "none"}
        pq.write_table(table, path, **how)
    return paths


def test_files_of_the_same_names_and_sizes_with_other_values_are_another_table(
    serve, named, tmp_path
):
    ours, theirs = plain(tmp_path / "ours", 1), plain(tmp_path / "theirs", 2)
    assert (
        ParquetFiles.open(ours, "label=label;dense=x").version
        == ParquetFiles.open(theirs, "label=label;dense=x").version
    )
    how = {"roles": {"label": "label", "dense": "x"}, "reader": "arrow"}
    with raises(RemoteError, "worker 127.0.0.1", "theirs/part-0.parquet", "another table", "files"):
        hashes(ours, **how, workers=named(serve(partial(open_maker, theirs, NOTHING))))


def test_a_feature_table_whose_records_tell_of_other_content_is_another_table(
    asked, table, tmp_path
):
    job, _, _ = asked
    copy = Path(shutil.copytree(table.uri, tmp_path / "copy"))
    UnitMaker(job, FeatureTable.open(copy)).close()
    [record] = (copy / "_sluice" / "jobs").glob("*.json")
    digest = next(
        f.sha256 for record in table.records.values() for f in record.files if f.split == "train"
    )
    record.write_text(record.read_text().replace(digest, digest[::-1]))
    with raises(RemoteError, "copy", "another table", "files"):
        UnitMaker(job, FeatureTable.open(copy))


def test_a_file_that_another_one_replaced_is_refused_by_name(tmp_path):
    """The other one has the same name and size."""
    ours, other = plain(tmp_path / "ours", 1), plain(tmp_path / "other", 2)
    job, units = job_and_units(ParquetFiles.open(ours, "label=label;dense=x"))
    unit = next(unit for unit in units if unit.file == 0)
    maker = open_maker(ours, NOTHING, job)
    os.replace(other[0], ours[0])
    with raises(SourceError, f"part-0.parquet, row group {unit.group}: the file was replaced"):
        maker.rows(unit)
    maker.close()


def test_an_answer_to_another_request_is_none(asked):
    """Of another unit, epoch, version or plan of the same shape."""
    job, _, [unit, *_] = asked
    others = [replace(unit, epoch=unit.epoch + 1), replace(unit, group=unit.group + 1)]
    requests = [other.request(job) for other in others]
    for name in ("version", "files", "plan", "made", "split"):
        requests.append(unit.request(replace(job, **{name: "7"})))
    for request in requests:
        body = answer(request.body, lambda *_: ({}, {}))
        with raises(WrongAnswer, "another request"):
            read_answer(body, unit.request(job).body)


def test_what_no_remote_worker_can_do_is_refused_and_so_is_a_wrong_name_of_workers(
    table, named, worker
):
    for how, facts in (
        ({"workers": "local:0"}, ("'local:0'", "1 to 256")),
        ({"workers": "ray"}, ("'ray'", "local:4", "ray://HOST:PORT")),
        ({"workers": "nowhere?token=/dev/null"}, ("'nowhere'", "HOST:PORT", "local:N")),
        ({"workers": "a:1?token=/nothing/there"}, ("/nothing/there", "No such file")),
        (
            {"workers": named(worker), "files": FileOpener(disturbed="latency_ms=1")},
            ("slow or faulty on purpose",),
        ),
    ):
        with raises(RemoteError, *facts):
            open_loader(table, batch_size=160, **how)


def test_an_error_of_a_column_names_worker_and_file(serve, named, tmp_path):
    paths = [str(tmp_path / f"part-{n}.parquet") for n in range(2)]
    for path, x in zip(paths, (2.0, None), strict=True):
        table = pa.table({"label": pa.array([0, 1] * 200, pa.int8()), "x": [1.0, x] * 200})
        pq.write_table(table, path, row_group_size=100, write_statistics=False)
    how = {"roles": {"label": "label", "dense": "x"}, "reader": "arrow"}
    server = serve(partial(open_maker, paths, NOTHING))
    with raises(ColumnError, "worker 127.0.0.1", "part-1.parquet", "'x'", "50 empty"):
        hashes(paths, **how, workers=named(server))


def test_a_store_that_a_worker_does_not_see_is_named_with_the_file(serve, named, table, tmp_path):
    copy = Path(shutil.copytree(table.uri, tmp_path / "copy"))
    gone = copy / Path(table.files_of("train")[1].path).relative_to(table.uri)
    gone.unlink()
    server = serve(lambda job: UnitMaker(job, FeatureTable.open(copy)))
    with raises(SourceError, "worker 127.0.0.1", gone.name, "No such file"):
        hashes(table, workers=named(server))
