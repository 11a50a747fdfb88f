"""A batch by the names of its columns, and in the forms that other programs take."""

import weakref

import numpy as np
import pyarrow as pa
import pytest
import torch

from sluice import BagColumn, Batch, Errors, Loader, Order
from sluice.ingest.batch import FORMS
from tests.etl.tables import write_rows
from tests.product import LoaderError, LoadingError
from tests.raises import raises

ROWS = 600
ROLES = "label=clicked;dense=price,size;sparse=item,shop;id_list=seen"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows that tell what they are: the label from the price, ids from the row's number, as many ids as it says."""
    folder = tmp_path_factory.mktemp("forms")
    numbers = np.arange(ROWS)
    write_rows(
        folder / "part-0.parquet",
        row_group_size=100,
        clicked=(numbers % 2).astype(np.int8),
        price=numbers.astype(np.float32),
        size=(numbers / 2).astype(np.float32),
        item=(numbers % 50).astype(np.int32),
        shop=(numbers % 7).astype(np.int32),
        seen=pa.array([[int(n)] * (n % 4) for n in numbers], pa.list_(pa.int32())),
    )
    return str(folder)


def _loader(files, bags=True, **more):
    roles = ROLES if bags else ROLES.removesuffix(";id_list=seen")
    return Loader(files, **{"batch_size": 64, "roles": roles, "tuning": "fixed"} | more)


def _check(columns, bags):
    rows = np.asarray(columns["price"]).astype(int)
    assert np.asarray(columns["clicked"]).tolist() == (rows % 2).tolist()
    assert np.asarray(columns["size"]).tolist() == (rows / 2).tolist()
    assert np.asarray(columns["item"]).tolist() == (rows % 50).tolist()
    assert np.asarray(columns["shop"]).tolist() == (rows % 7).tolist()
    if bags:
        assert isinstance(columns["seen"], BagColumn)
        assert np.asarray(columns["seen"].lengths).tolist() == (rows % 4).tolist()
        assert np.asarray(columns["seen"].values).tolist() == [
            n for n in rows for _ in range(n % 4)
        ]


@pytest.mark.parametrize("bags", [True, False])
def test_columns_have_their_names(files, bags):
    with _loader(files, bags) as loader:
        for batch in loader:
            assert batch.names == (
                "price",
                "size",
                "item",
                "shop",
                *(("seen",) if bags else ()),
                "clicked",
                "weight",
            )
            assert len(batch) == 64
            _check({name: batch[name] for name in batch.names}, bags)
            _check(batch.as_dict(), bags)
            assert list(batch.as_dict()) == list(batch.names)
            assert batch["price"].data_ptr() == batch.dense.data_ptr(), "nothing is copied"
            with pytest.raises(KeyError, match=r"no column 'prise'.*did you mean 'price'"):
                batch["prise"]
            same = batch.to("cpu", non_blocking=True)
            assert same.names == batch.names
            assert torch.equal(same.values, batch.values)


def test_each_tensor_is_pinned(files, monkeypatch):
    pinned = []
    monkeypatch.setattr(
        torch.Tensor,
        "pin_memory",
        lambda tensor: pinned.append(tensor.data_ptr()) or tensor.clone(),
    )
    with _loader(files) as loader:
        batch = next(iter(loader))
        other = batch.pin_memory()
    assert pinned == [
        t.data_ptr() for t in (batch.dense, batch.values, batch.lengths, batch.label, batch.weight)
    ]
    assert other.names == batch.names


@pytest.mark.parametrize("form", FORMS)
def test_a_loader_gives_batches_in_any_form(files, form):
    """The same rows in the same order, epoch after epoch, also where one was broken off."""
    with _loader(files) as plain, _loader(files, as_=form) as loader:
        if form == "kjt":
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        for _ in range(2):
            for batch, other in zip(plain, loader, strict=True):
                if form == "batch":
                    assert isinstance(other, Batch)
                elif form == "kjt":
                    assert torch.equal(other.dense_features, batch.dense)
                    assert torch.equal(other.labels, batch.label)
                    assert isinstance(other.sparse_features, KeyedJaggedTensor)
                    assert other.sparse_features.keys() == ["item", "shop", "seen"]
                    assert other.sparse_features["seen"].to_dense()[3].tolist() == [
                        batch["price"][3]
                    ] * (int(batch["price"][3]) % 4)
                elif form == "pandas":
                    assert [list(ids) for ids in other["seen"]] == [
                        [n] * (int(n) % 4) for n in other["price"]
                    ]
                    _check(other, bags=False)
                else:
                    _check(other, bags=True)
                    kind = torch.Tensor if form == "dict" else np.ndarray
                    assert all(isinstance(column, (kind, BagColumn)) for column in other.values())
        assert plain.order_hash == loader.order_hash
        broken = iter(loader)
        next(broken)
        broken.close()
        assert sum(1 for _ in loader) == len(loader)


def test_what_a_form_gave_is_not_held(files, monkeypatch):
    """The memory of a batch is used again once it is free, so the loader lets go of it before it makes the next."""
    given, gone = [], []

    def form(batch):
        gone.extend(reference() is None for reference in given)
        columns = batch.numpy()
        given[:] = [weakref.ref(columns["price"])]
        return columns

    monkeypatch.setitem(FORMS, "numpy", form)
    with _loader(files, as_="numpy") as loader:
        for columns in loader:
            assert len(columns["price"]) == 64
            del columns
    assert gone
    assert all(gone)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({"as_": "dicts"}, ("as_='dicts'", "batch, dict, kjt, numpy, pandas", "'dict'")),
        ({"as_": "kjt", "order": Order(last="pad")}, ("as_='kjt'", "last='pad'", "weights")),
        (
            {"as_": "kjt", "errors": Errors(on_error="quarantine")},
            ("as_='kjt'", "on_error='quarantine'", "weights"),
        ),
        ({"as_": "kjt", "roles": "label=clicked;weight=price;sparse=item"}, ("'price'", "weights")),
        ({"as_": None}, ("as_=None", "batch, dict, kjt, numpy, pandas")),
        ({"knobs": "decode=2"}, ("knobs='decode=2'", "knobs=Knobs(workers={'decode': 2})")),
    ],
)
def test_what_cannot_be_is_refused_at_once(files, more, facts):
    with raises(LoaderError, *facts):
        _loader(files, **more)


def test_a_feature_that_has_the_name_of_the_weights_is_not_replaced_by_them(tmp_path):
    write_rows(tmp_path / "a.parquet", y=[0.0, 1.0] * 8, weight=[70.5] * 16)
    with Loader(
        str(tmp_path), batch_size=16, roles="label=y;dense=weight", tuning="fixed"
    ) as loader:
        batch = next(iter(loader))
    assert batch["weight"].tolist() == [70.5] * 16
    for form in (batch.as_dict, batch.numpy, batch.pandas):
        with raises(LoadingError, "'weight'", "rename"):
            form()
