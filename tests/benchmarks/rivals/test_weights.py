"""Weights in a file: what is written is read, and other content is refused."""

import numpy as np
import pytest

from sluice.benchmarks.rivals import weights
from tests.raises import raises


@pytest.mark.parametrize("length", range(8))
def test_what_is_written_is_read(tmp_path, length):
    """With headers of all lengths, which the library fills up to a multiple of eight."""
    path, numbers = tmp_path / "w", np.arange(6, dtype=np.float32).reshape(2, 3)
    record = {"note": "x" * length}
    weights.write(path, {"a": numbers, "b": numbers[1]}, record)
    whole = path.read_bytes()
    header = whole[8 : 8 + int.from_bytes(whole[:8], "little")].rstrip()
    path.write_bytes(len(header).to_bytes(8, "little") + header + whole[-9 * 4 :])
    read, told = weights.read(path, {"a": (2, 3), "b": (3,)}, "make")
    assert np.array_equal(read["a"], numbers)
    assert np.array_equal(read["b"], numbers[1])
    assert told == record


@pytest.mark.parametrize(
    ("kind", "shapes", "facts"),
    [
        (np.float32, {"a": (3, 2)}, ["a has shape (2, 3), not (3, 2)"]),
        (np.float32, {"c": (2, 3)}, ["'c'", "`make new` makes one"]),
        (np.float64, {"a": (2, 3)}, ["F64, not F32"]),
    ],
)
def test_other_weights_are_refused(tmp_path, kind, shapes, facts):
    weights.write(tmp_path / "w", {"a": np.zeros((2, 3), kind)}, {})
    with raises(weights.WeightsError, "w", *facts):
        weights.read(tmp_path / "w", shapes, "make new")
