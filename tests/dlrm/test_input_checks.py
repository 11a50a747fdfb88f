from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sluice.dlrm.training.input_checks import BadData, BatchChecker, check_footers, find
from tests.dlrm.rig import DENSE, SIZES, batch


def guard():
    return BatchChecker(SIZES, DENSE, "train")


def test_good_batches_pass():
    for step in range(5):
        guard().check(batch(step, 64))


@pytest.mark.parametrize(("column", "bad"), [("big", 4000), ("mid", -1), ("tiny", 3)])
def test_an_id_outside_its_table_is_named(column, bad):
    b = batch(3, 64)
    b.values[list(SIZES).index(column) * 64 + 5] = bad
    with pytest.raises(BadData, match=rf"column '{column}': id {bad} is outside its table of {SIZES[column]} rows "
                                      r"\(epoch 0, step 3 of train\)"):
        guard().check(b)


def test_an_id_in_a_bag_is_found():
    b = batch(0, 4)
    b.lengths = torch.tensor([2, 0, 1, 3] + [0] * 4 + [1] * 4 + [0, 0, 0, 1], dtype=torch.int32)
    b.values = torch.tensor([1, 2, 3, 4, 5, 6, 0, 1, 2, 6, 2], dtype=torch.int32)
    guard().check(b)
    b.values[-1] = 3
    with pytest.raises(BadData, match="column 'tiny': id 3"):
        guard().check(b)


def test_bags_that_hold_as_many_ids_as_there_are_rows_in_all_columns_together_are_told_apart():
    """One column's long bags make up for another's short ones: ids must not be taken for the next column's."""
    b = batch(0, 4)
    b.lengths = torch.tensor([2, 2, 2, 2] + [0] * 4 + [1] * 4 + [1] * 4, dtype=torch.int32)
    b.values = torch.tensor([3999] * 8 + [6] * 4 + [2] * 4, dtype=torch.int32)
    guard().check(b)
    b.values[-1] = 6
    with pytest.raises(BadData, match="column 'tiny': id 6"):
        guard().check(b)


@pytest.mark.parametrize("bad", [2.0, 0.5, -1.0, float("nan")])
def test_a_label_must_be_0_or_1(bad):
    b = batch(0, 64)
    b.label[7] = bad
    with pytest.raises(BadData, match="neither 0 nor 1"):
        guard().check(b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_feature_that_is_no_number_is_named(bad):
    b = batch(0, 64)
    b.dense[9, 1] = bad
    with pytest.raises(BadData, match="column 'd1'"):
        guard().check(b)


def test_finite_features_whose_sum_is_not_are_no_error():
    b = batch(0, 64)
    b.dense[:, 0] = 3e38
    guard().check(b)


def write(path, label, ids, statistics=True):
    pq.write_table(pa.table({"label": pa.array(label, pa.int8()), "C1": pa.array(ids, pa.int32())}), path,
                   row_group_size=2, write_statistics=statistics)
    return str(path)


def test_statistics_of_files_name_file_and_row_group(tmp_path):
    good = write(tmp_path / "a.parquet", [0, 1, 1, 0], [0, 1, 2, 9])
    bad = write(tmp_path / "b.parquet", [0, 1, 1, 0], [0, 1, 2, 10])
    check_footers([good], {"C1": 10}, "label")
    with pytest.raises(BadData, match=r"b.parquet, row group 1: column 'C1' holds id 10, outside its table of 10 rows"):
        check_footers([good, bad], {"C1": 10}, "label")
    label = write(tmp_path / "c.parquet", [0, 1, 3, 0], [0, 1, 2, 9])
    with pytest.raises(BadData, match=r"c.parquet, row group 1: label 'label' holds 3"):
        check_footers([label], {"C1": 10}, "label")


def test_files_without_statistics_are_left_to_the_guard(tmp_path):
    check_footers([write(tmp_path / "a.parquet", [0, 7], [0, 99], statistics=False)], {"C1": 10}, "label")


def test_a_value_is_found_in_its_file_and_row_group(tmp_path):
    one = write(tmp_path / "a.parquet", [0, 1, 1, 0], [0, 1, 2, 9])
    two = write(tmp_path / "b.parquet", [0, 1, 1, 5], [0, 1, 77, 10])
    table = SimpleNamespace(fields=[SimpleNamespace(name="label", role="label")], schema=pq.read_schema(one),
                            files_of=lambda _: [SimpleNamespace(path=p) for p in (one, two)])
    assert find(table, "train", "C1", 77) == f"{two}, row group 1"
    assert find(table, "train", None, 5) == f"{two}, row group 1"
    assert find(table, "train", "C1", 78) is None
    b = batch(3, 64)
    b.values[5] = 4000
    with pytest.raises(BadData, match=r"step 3 of train; there\)"):
        BatchChecker(SIZES, DENSE, "train",
                     find=lambda column, value: "there" if (column, value) == ("big", 4000) else None).check(b)
