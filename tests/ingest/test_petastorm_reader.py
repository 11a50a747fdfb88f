"""The loader reads every row group by Petastorm's Reader and worker. Its predicates and transforms
work as in Petastorm."""

import json
import os
import threading
from collections import Counter

import numpy as np
import pytest

from sluice import Errors, Knobs, Transform
from sluice.ingest.read.parquet_files import ParquetError
from sluice.ingest.read.petastorm import compat
from tests.etl.tables import write_rows
from tests.open_loader import open_loader
from tests.product import (
    BatchLoader,
    ColumnError,
    LoaderError,
    PetastormError,
    PetastormOptions,
    SourceError,
)
from tests.raises import raises

compat.install()

from petastorm.arrow_reader_worker import ArrowReaderWorker  # noqa: E402
from petastorm.predicates import in_lambda, in_set  # noqa: E402
from petastorm.reader import Reader  # noqa: E402
from petastorm.transform import TransformSpec  # noqa: E402

pytestmark = pytest.mark.slow

ROWS, GROUP = 960, 120
TEXTS = np.array(["ant", "bee", "cat"])


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """Two files of four row groups: a label, a number, an id of its own for each row, and a text."""
    folder = tmp_path_factory.mktemp("clicks")
    for part in range(2):
        rows = np.arange(part * ROWS // 2, (part + 1) * ROWS // 2)
        write_rows(
            folder / f"part-{part}.parquet",
            row_group_size=GROUP,
            label=rows % 2,
            number=rows.astype(np.float32),
            row=rows,
            text=TEXTS[rows % 3],
        )
    return folder


ROLES = {"label": "label", "dense": "number", "sparse": "row"}


def loaded(source, **options):
    """A loader's batches of one epoch as columns, and its order hash."""
    with open_loader(
        source, **{"batch_size": 80, "roles": ROLES, "reader": "petastorm"} | options
    ) as loader:
        batches = list(loader)
        ids = loader.sparse_names
        columns = {
            name: np.concatenate([b.values.reshape(len(ids), -1)[n] for b in batches])
            for n, name in enumerate(ids)
        }
        columns |= {
            name: np.concatenate([b.dense[:, n].numpy() for b in batches])
            for n, name in enumerate(loader.dense_names)
        }
        columns["label"] = np.concatenate([b.label.numpy() for b in batches])
        return {name: np.asarray(values) for name, values in columns.items()}, loader.order_hash


# ---- every row group comes through Petastorm's Reader and worker


@pytest.mark.parametrize(
    ("mode", "knobs"),
    [
        ("thread", Knobs(workers={"decode": 3})),
        ("two", Knobs(workers={"decode": 2})),
        ("process", Knobs(workers={"decode": 2, "process": 2}, backend={"process": "process"})),
    ],
)
def test_every_row_group_comes_through_petastorms_reader_and_worker(
    table, monkeypatch, mode, knobs
):
    calls, lock = Counter(), threading.Lock()

    def counted(kind, name):
        original = getattr(kind, name)

        def call(self, *args, **options):
            result = original(self, *args, **options)  # raises at the end of an epoch
            with lock:
                calls[name] += 1
            return result

        monkeypatch.setattr(kind, name, call)

    counted(ArrowReaderWorker, "process")
    counted(ArrowReaderWorker, "_load_rows")
    counted(Reader, "__next__")
    with open_loader(
        table,
        batch_size=80,
        knobs=knobs,
        transforms=["tests.ingest.worker_functions:process"],
        reader="petastorm",
    ) as loader:
        at = loader.dense_names.index("I1")
        processes = {int(number) for batch in loader for number in batch.dense[:, at]}
        assert (os.getpid() in processes) == (mode != "process")
        reads = len(loader.plan.schedule(0).reads)
        assert reads == sum(map(len, loader.plan.groups))
        assert calls == {"process": reads, "_load_rows": reads, "__next__": reads}


# ---- a user's TransformSpec


def worked_over(frame):
    frame["kind"] = frame["text"].map({"ant": 1, "bee": 2, "cat": 3})
    frame["number"] = frame["number"] * 2 + frame["row"]
    return frame.drop(columns="text")


SPEC = TransformSpec(
    worked_over,
    edit_fields=[("kind", np.int32, (), False), ("number", np.float64, (), False)],
    removed_fields=["text"],
)


def test_a_transform_spec_sees_stored_rows_and_gives_the_columns(clicks):
    roles = {"label": "label", "dense": "number", "sparse": ["row", "kind"]}
    columns, order = loaded(clicks, transforms=[SPEC], roles=roles)
    rows = columns["row"]
    assert sorted(rows) == list(range(ROWS))
    assert (columns["kind"] == 1 + rows % 3).all()
    assert (columns["number"] == 3.0 * rows).all()
    for reader, knobs in (
        ("petastorm", Knobs(workers={"decode": 4})),
        ("arrow", None),
        ("petastorm", Knobs(backend={"TransformSpec": "process"})),
    ):
        again, same = loaded(clicks, transforms=[SPEC], roles=roles, knobs=knobs, reader=reader)
        assert same == order
        assert all((again[name] == columns[name]).all() for name in columns)


def test_a_loader_with_a_transform_spec_goes_on_where_it_was_and_asks_for_the_spec(clicks):
    options = {"batch_size": 80, "roles": ROLES, "reader": "petastorm"}
    with open_loader(clicks, transforms=[SPEC], **options) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [b.checksum for b in batches]
    with open_loader(clicks, transforms=[SPEC], **options) as loader:
        loader.load_state_dict(state)
        assert [b.checksum for b in loader] == rest
    with (
        open_loader(clicks, **options) as loader,
        raises(LoaderError, "'TransformSpec'", "worked_over", "transforms=[]"),
    ):
        loader.load_state_dict(state)


def test_fields_are_removed_and_selected_without_a_function(clicks):
    selected = TransformSpec(selected_fields=["row", "label"])
    columns, _ = loaded(clicks, transforms=[selected], roles={"label": "label", "sparse": "row"})
    assert set(columns) == {"row", "label"}
    with raises(ParquetError, "roles", "'number'", "label, row"):
        loaded(clicks, transforms=[selected])
    with raises(ParquetError, "roles", "'number'", "label, row, text"):
        loaded(clicks, transforms=[TransformSpec(removed_fields=["number"])])


@pytest.mark.parametrize(
    ("function", "edits", "facts"),
    [
        (lambda frame: frame[frame["row"] > 3], None, ("returned 116 rows", 120, "predicate")),
        (lambda frame: frame.drop(columns="row"), None, ("result columns", "number", "schema")),
        (lambda frame: frame["nothing"], None, ("TransformSpec", "KeyError: 'nothing'")),
        (
            lambda frame: frame.assign(row=frame["row"] + 0.5),
            [("row", np.int32, (), False)],
            ("0.500000", "int32"),
        ),
    ],
)
def test_a_function_that_breaks_the_contract_is_named_with_its_row_group(
    clicks, function, edits, facts
):
    with raises(ColumnError, "part-0.parquet", "row group 0", *facts):
        loaded(
            clicks,
            transforms=[TransformSpec(function, edits)],
            shuffle=False,
            streams=1,
            knobs=Knobs(workers={"decode": 1}),
        )


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (
            [TransformSpec(removed_fields=["numbr"])],
            ("removed_fields", "'numbr'", "'number'"),
        ),
        ([TransformSpec(selected_fields=["row", "nothing"])], ("selected_fields", "'nothing'")),
        (
            [TransformSpec(edit_fields=[("row", object, (), False)])],
            ("edit_fields", "'row'", "<class 'object'>"),
        ),
        ([SPEC, SPEC], ("transforms", "only one")),
        ([Transform(np.log1p, "first"), SPEC], ("transforms", "first")),
    ],
)
def test_a_transform_spec_that_cannot_be_is_refused_at_the_start(clicks, given, facts):
    with raises(PetastormError, *facts):
        BatchLoader(clicks, batch_size=80, roles=ROLES, transforms=given)


def test_a_row_group_on_which_the_function_fails_can_be_quarantined(clicks, tmp_path):
    def function(frame):
        if (frame["row"] == 130).any():
            raise RuntimeError("boom")
        return frame

    errors = Errors(on_error="quarantine", quarantine=tmp_path / "list.jsonl", probation_rows=10**6)
    with BatchLoader(
        clicks, batch_size=80, roles=ROLES, transforms=[TransformSpec(function)], errors=errors
    ) as loader:
        weights = sum(float(b.weight.sum()) for b in loader)
        assert loader.quarantined["rows_set_aside"] == GROUP
    assert weights == ROWS - GROUP
    assert "boom" in (tmp_path / "list.jsonl").read_text()


# ---- predicates


def test_a_predicate_leaves_rows_out_of_the_order(clicks):
    odd = in_lambda(["text", "row"], lambda text, row: (text == "bee") & (row >= 2 * GROUP))
    options = PetastormOptions(predicate=odd)
    expected = [row for row in range(2 * GROUP, ROWS) if row % 3 == 1]
    how = {"petastorm": options, "last": "pad", "shuffle": False, "streams": 1}
    copy = Transform(
        lambda c: {"number": c["row"]}, "copy", reads=["row"], gives={"number": "int64"}
    )
    (columns, order), (_, again) = (
        loaded(clicks, **how, transforms=functions) for functions in ([], [copy])
    )
    assert columns["row"][: len(expected)].tolist() == expected
    assert not columns["row"][len(expected) :].any(), "padding"
    assert order == again
    with open_loader(clicks, batch_size=80, roles=ROLES, petastorm=options) as loader:
        assert loader.plan.rows == len(expected)
        assert [bool(n) for n in loader.plan.groups[0]] == [False, False, True, True]


def test_a_predicate_that_chooses_other_rows_each_time_is_an_error(clicks):
    asked = Counter()

    def first_time(row):
        asked[int(row.iloc[0])] += 1
        return row % 2 >= asked[int(row.iloc[0])] - 1

    options = PetastormOptions(predicate=in_lambda(["row"], first_time))
    with raises(SourceError, "row group", "60 rows", 120, "predicate"):
        loaded(clicks, petastorm=options)


def test_a_state_is_refused_by_other_rows_even_if_they_are_as_many(clicks):
    how = {"batch_size": 80, "roles": ROLES}
    even, odd = (
        PetastormOptions(predicate=in_lambda(["row"], lambda row, rest=rest: row % 2 == rest))
        for rest in (0, 1)
    )
    with open_loader(clicks, petastorm=even, **how) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    for other in ({"petastorm": odd}, {}):
        with (
            open_loader(clicks, **how, **other) as loader,
            raises(LoaderError, "belongs to other rows", "predicate"),
        ):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"predicate": in_set({1}, "nothing")}, ("part-0.parquet", "'nothing'")),
        (
            {"predicate": "row > 3"},
            ("predicate", "'row > 3'", "petastorm.predicates.PredicateBase"),
        ),
    ],
)
def test_what_petastorms_reader_cannot_be_asked_for_is_named(clicks, options, facts):
    with raises(ValueError, *facts):
        loaded(clicks, petastorm=PetastormOptions(**options))


def test_what_is_petastorms_is_refused_of_the_arrow_reader(clicks):
    with raises(SourceError, "predicate", "reader='petastorm'"):
        loaded(clicks, reader="arrow", petastorm=PetastormOptions(predicate=in_set({1}, "row")))
