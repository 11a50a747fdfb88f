"""Compressed text that is cut short or damaged: never fewer rows without a word, always the file's name."""

from __future__ import annotations

import bz2
import gzip

import pyarrow as pa
import pytest

from sluice.common.errors import InputError
from sluice.etl.apply.input_checks import fault
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.spark.errors import clearly, find_cause
from sluice.etl.spark.read_input import RawInput
from tests.etl.jobs import run
from tests.etl.tables import column, write_spec
from tests.raises import assert_names, raises

LINES = "".join(f"{n % 2},item {n * 7919 % 100_003}\n" for n in range(40_000)).encode()
TEXT = write_spec("click:int item:text", column("item", "sparse", "hash, size = 100"), form="csv")


def blocks(data: bytes) -> list[int]:
    """Behind which bytes of a bzip2 file its blocks end."""
    bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
    mark = f"{int.from_bytes(b'1AY&SY', 'big'):048b}"
    found, at = [], bits.find(mark)
    while at >= 0:
        found.append(-(-at // 8))
        at = bits.find(mark, at + 48)
    return found


def ends(data: bytes) -> tuple[bytes, bytes]:
    return data[:10], data[-11:]


def test_a_file_is_whole_only_with_its_end():
    for size in range(200):  # the mark behind the last block begins at any bit
        data = bz2.compress(LINES[: size * 10])
        assert fault("a.bz2", *ends(data)) is None
        assert all(fault("a.bz2", *ends(data[:-cut])) for cut in range(1, 12) if cut < len(data))
        assert_names(fault("a.bz2", *ends(data + b"\n")) or "", "end", "follows")
    # Some programs write one after the other.
    assert fault("a.bz2", *ends(bz2.compress(LINES) * 2)) is None
    assert_names(fault("a.bz2", *ends(LINES)) or "", "no bzip2 file")
    assert_names(fault("a.gz", *ends(LINES)) or "", "no gzip file")
    assert fault("a.gz", *ends(gzip.compress(LINES))) is None
    assert fault("a.csv", *ends(LINES)) is None
    assert fault("a.bz2", b"", b"") is None  # an empty file is not in the way


def test_what_java_says_of_damage_names_the_file_and_what_to_do():
    trace = (
        "Caused by: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading "
        "file file:///data/day_1.csv.gz.  SQLSTATE: KD001\n"
        "Caused by: java.io.IOException: gzip stream CRC failure"
    )
    facts = ("copy it here anew", "gzip stream CRC failure", "nothing was published")
    assert_names(find_cause(trace), "file:///data/day_1.csv.gz:", *facts)


def zstd(data: bytes) -> bytes:
    with pa.BufferOutputStream() as kept:
        with pa.CompressedOutputStream(kept, "zstd") as stream:
            stream.write(data)
        return kept.getvalue().to_pybytes()


@pytest.mark.spark
@pytest.mark.parametrize("reader", ["local", "workers", "java"])
def test_zstandard_of_several_frames_is_read_whole_or_refused_by_name(
    spark, tmp_path, monkeypatch, reader
):
    """Spark's own reader would read the frames before the one that is cut, so it reads none."""
    engine, name = None if reader == "local" else spark, "a.csv.zst"
    frames = zstd(LINES[:-6000]), zstd(LINES[-6000:])
    (tmp_path / "good").mkdir()
    for kind, data in {"frames": b"".join(frames), "empty": b"", "nothing": zstd(b"")}.items():
        (tmp_path / "good" / f"{kind}.csv.zst").write_bytes(data)
    if reader == "java":
        monkeypatch.setattr(RawInput, "files", None)
        with raises(InputError, ".csv.zst:", "only Spark", "decompress", ".gz"):
            run(engine, tmp_path / "t", tmp_path / "good", text=TEXT)
        return
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
        (tmp_path / kind).mkdir()
        (tmp_path / kind / name).write_bytes(data)
        with raises((InputError, JobFailure), f"/{kind}/a.csv.zst:", "copy it here"), clearly():
            run(engine, tmp_path / f"t-{kind}", tmp_path / kind, text=TEXT)
        assert not list((tmp_path / f"t-{kind}").rglob("*.parquet"))


@pytest.mark.spark
def test_a_file_that_is_cut_short_is_refused_by_name(spark, tmp_path):
    """Of bzip2 also one that ends where a block does, which Spark takes for whole."""
    data = bz2.compress(LINES * 6, 1)
    middle = blocks(data)[len(blocks(data)) // 2]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "whole.csv.bz2").write_bytes(data)
    (tmp_path / "in" / "cut.csv.bz2").write_bytes(data[:middle])
    with pytest.raises(
        InputError, match=r"/in/cut\.csv\.bz2: its end is missing.*copy it here anew, whole"
    ):
        run(spark, tmp_path / "t", tmp_path / "in", text=TEXT)
    (tmp_path / "in" / "cut.csv.bz2").unlink()
    (tmp_path / "in" / "cut.csv.gz").write_bytes(gzip.compress(LINES)[:-4])
    with (
        pytest.raises(
            JobFailure,
            match=r"/in/cut\.csv\.gz: it is cut short: copy it here anew \(.*\); nothing "
            r"was published",
        ),
        clearly(),
    ):
        run(spark, tmp_path / "t", tmp_path / "in", text=TEXT)
    assert not list((tmp_path / "t").rglob("*.parquet"))
