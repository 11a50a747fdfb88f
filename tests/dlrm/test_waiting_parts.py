"""`--follow parts`: a run that finds several versions waiting takes each part once, in order."""

from dataclasses import replace

import pyarrow as pa
import pytest

from sluice import FeatureTable
from sluice.dlrm.follow import versions
from tests.dlrm import clicks_table
from tests.product import CheckpointMeta, Config

ROWS = 500
PARTS = 4


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> FeatureTable:
    """Its versions are 0 to 3. Each adds a part."""
    folder = tmp_path_factory.mktemp("parts") / "table"
    for part in range(PARTS):
        raw = clicks_table.raw_rows(ROWS, first=part * ROWS)
        written = clicks_table.write(folder, raw, mode="append" if part else "create")
    return written


def numbers(table: FeatureTable) -> list[float]:
    """What the spec made of the raw rows' numbers, which are each row's own."""
    read = pa.concat_tables(
        pa.parquet.read_table(file.path, columns=["number"], partitioning=None)
        for file in table.files
    )
    return sorted(read["number"].to_pylist())


def after(table: FeatureTable, version: int, config: Config, *, step: int = 0) -> CheckpointMeta:
    """The checkpoint of a run that has trained on the versions up to one."""
    meta = CheckpointMeta.of(FeatureTable.open(table.uri, version), config.to_dict())
    return replace(meta, epoch=version + 1, loader={"epoch": version + 1, "step": step})


def test_waiting_parts_are_taken_one_after_the_other(table):
    config = Config(data=table.uri, version=0, follow="parts")
    taken, version = [], 0
    while True:
        part = versions.view(FeatureTable.open(table.uri, version), "parts")
        taken.append(numbers(part))
        follower = versions.next_version(config, after(table, version, config))
        if follower is None:
            break
        assert versions.next_version(config, after(table, version, config, step=1)) is None
        version = follower
    assert len(taken) == PARTS
    assert [len(part) for part in taken] == [ROWS] * PARTS
    assert [number for part in taken for number in part] == numbers(table)


def test_a_part_is_one_epoch(table):
    config = Config(data=table.uri, version=0, follow="parts", epochs=7)
    meta = after(table, 1, config)
    assert versions.epochs_of(config, meta) == 2  # it is over
    assert versions.epochs_of(config, replace(meta, loader={"epoch": 2, "step": 3})) == 3
    third = FeatureTable.open(table.uri, 2)
    assert versions.epochs_of(config, meta.following(third, config.to_dict())) == 3
    assert versions.epochs_of(replace(config, follow="epochs"), meta) == 7


def test_with_epochs_the_newest_version_is_next_and_has_all_rows(table):
    config = Config(data=table.uri, version=0, follow="epochs", epochs=3)
    assert versions.next_version(config, after(table, 0, config)) == PARTS - 1
    assert versions.next_version(config, after(table, 0, config, step=1)) is None
    assert versions.next_version(config, after(table, 2, config)) is None  # the epochs are over
    assert versions.view(table, "epochs") == table
