"""Messages between ranks arrive unchanged, and values that cannot be sent are refused before."""

from collections import Counter

import numpy as np
import pytest
import torch

from sluice.dlrm.ranks import packed, unpacked
from tests.raises import raises


def test_words_numbers_and_arrays_arrive_as_they_were():
    said = {
        "text": "é\0",
        "none": None,
        "inf": float("inf"),
        "yes": True,
        "list": [1, [2.5, "x"], {}],
        "array": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "empty": np.zeros((0, 3), np.float32),
        "number": torch.tensor(7),
        "bytes": np.array([True, False]),
        "tensor": torch.arange(3.0),
    }
    got = unpacked(packed(said))
    assert list(got) == list(said)
    for key, value in said.items():
        if isinstance(value, (np.ndarray, torch.Tensor)):
            forms, expected = (
                (type(value_form), value_form.dtype, value_form.shape, value_form.tolist())
                for value_form in (got[key], value)
            )
            assert forms == expected
        else:
            assert got[key] == value
    got["tensor"] += 1  # memory of its own
    assert unpacked(packed((1, (2,)))) == [1, [2]]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.array([object()]),
        np.array(["text"]),
        {1, 2},
        b"bytes",
        [Counter(a=1), print],
    ],
)
def test_only_plain_values_are_sent_to_other_ranks(value):
    with raises(TypeError, "rank"):
        packed(value)
