"""Speed of cores and memory: measured once, remembered, measured again where the memory of it is damaged."""

from __future__ import annotations

import itertools

import pytest

from sluice.tools.doctor import Speed, measure_speed, speed_of

FAST = Speed(core_bytes_per_s=1e9, memory_bytes_per_s=2e10)


def _never():
    raise AssertionError("it was remembered")


def test_the_best_try_counts():
    times = itertools.chain(
        [0.0, 5.0],
        [5.0, 6.0],
        [6.0, 20.0],
        [20.0, 24.0],
        [24.0, 30.0],  # hashing: 1 s at best
        [30.0, 34.0],
        [34.0, 36.0],
        [36.0, 40.0],
        [40.0, 44.0],
        [44.0, 48.0],
    )  # copying: 2 s
    found = measure_speed(lambda: next(times))
    assert found == Speed(core_bytes_per_s=4 * 2**20, memory_bytes_per_s=32 * 2**20)


def test_this_machine_has_a_speed():
    found = measure_speed()
    assert found.core_bytes_per_s > 2**20
    assert found.memory_bytes_per_s > 2**20


def test_it_is_remembered_for_each_machine(tmp_path):
    assert speed_of("a", tmp_path / "new", lambda: FAST) == FAST
    assert speed_of("a", tmp_path / "new", _never) == FAST
    slow = Speed(core_bytes_per_s=1.0, memory_bytes_per_s=1.0)
    assert speed_of("b", tmp_path / "new", lambda: slow) == slow
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"core_bytes_per_s": 0, "memory_bytes_per_s": 1}',
        '{"core_bytes_per_s": 1, "memory_bytes_per_s": 1, "new": 1}',
    ],
)
def test_what_is_damaged_is_measured_again(tmp_path, text):
    speed_of("a", tmp_path, lambda: FAST)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert speed_of("a", tmp_path, lambda: FAST) == FAST
    assert speed_of("a", tmp_path, _never) == FAST


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path):
    (tmp_path / "file").write_text("")
    assert speed_of("a", tmp_path / "file", lambda: FAST) == FAST
