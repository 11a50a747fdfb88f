"""Compressed text that is cut short or damaged: never fewer rows without a word, always the file's name."""

import bz2
import gzip

import pyarrow as pa
import pytest

from tests.etl.jobs import run
from tests.etl.tables import column, put, write_spec
from tests.product import InputError, JobFailure, spark_errors_as_job_failure
from tests.raises import raises

LINES = "".join(f"{n % 2},item {n * 7919 % 100_003}\n" for n in range(40_000)).encode()
TEXT = write_spec("click:int item:text", column("item", "sparse", "hash, size = 100"), form="csv")


def zstd(data: bytes) -> bytes:
    with pa.BufferOutputStream() as kept:
        with pa.CompressedOutputStream(kept, "zstd") as stream:
            stream.write(data)
        return kept.getvalue().to_pybytes()


@pytest.mark.spark
@pytest.mark.parametrize("reader", ["local", "workers"])
def test_zstandard_of_several_frames_is_read_whole_or_refused_by_name(spark, tmp_path, reader):
    engine, name = None if reader == "local" else spark, "a.csv.zst"
    frames = zstd(LINES[:-6000]), zstd(LINES[-6000:])
    for kind, data in {"frames": b"".join(frames), "empty": b"", "nothing": zstd(b"")}.items():
        put(tmp_path / "good" / f"{kind}.csv.zst", data)
    assert run(engine, tmp_path / "t", tmp_path / "good", text=TEXT).rows_out == 40_000
    bad = {
        "cut": frames[0] + frames[1][:-4],
        "head": frames[0] + frames[1][:3],
        "half": frames[0][:-9],
        "behind": frames[0] + b"more\n" * 9,
        "none": LINES,
    }
    if engine is not None:
        bad = {kind: bad[kind] for kind in ("cut", "behind")}
    for kind, data in bad.items():
        put(tmp_path / kind / name, data)
        with (
            raises(JobFailure, f"/{kind}/a.csv.zst:", "copy it here"),
            spark_errors_as_job_failure(),
        ):
            run(engine, tmp_path / f"t-{kind}", tmp_path / kind, text=TEXT)
        assert not list((tmp_path / f"t-{kind}").rglob("*.parquet"))


@pytest.mark.spark
def test_a_file_that_is_cut_short_is_refused_by_name(spark, tmp_path):
    put(tmp_path / "in" / "whole.csv.bz2", bz2.compress(LINES))
    flipped = bytearray(gzip.compress(LINES))
    flipped[99] ^= 255
    for name, data, why in (
        ("a.csv.bz2", bz2.compress(LINES * 6, 1)[:-60_000], "it is cut short"),
        ("b.csv.bz2", bz2.compress(LINES) + b"more", "it is damaged"),
        ("c.csv.gz", gzip.compress(LINES)[:-4], "it is cut short"),
        ("d.csv.gz", LINES, "it is no gzip file"),
        ("e.csv.gz", flipped, "it is damaged"),
    ):
        path = put(tmp_path / "in" / name, data)
        for engine in (None, spark):
            with (
                raises(JobFailure, f"/in/{name}: {why}", "copy it here anew", "nothing was"),
                spark_errors_as_job_failure(),
            ):
                run(engine, tmp_path / "t", tmp_path / "in", text=TEXT)
        path.unlink()
    assert not list((tmp_path / "t").rglob("*.parquet"))
    (tmp_path / "in" / "f.csv.lz4").touch()
    with raises(InputError, "/in/f.csv.lz4:", ".gz, .bz2 or .zst"):
        run(None, tmp_path / "t", tmp_path / "in", text=TEXT)
