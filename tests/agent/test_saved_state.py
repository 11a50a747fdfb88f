"""What one run learned and the next finds: places, damage, many writers, other schemas."""

from __future__ import annotations

import json
import os
import threading

import pytest

from sluice.agent.runtime.saved_state import check_writable, machine_fingerprint
from tests.ingest.s3 import LOST, S3Server, with_bucket
from tests.product import (
    BY_WAY,
    KnobContext,
    KnobError,
    Knobs,
    Limits,
    Machine,
    Registry,
    SavedState,
)
from tests.raises import raises

MIB = 2**20
LIMITS = Limits(workers={"decode": (1, 64)}, read_ahead_bytes=(MIB, 2**40))


def _entry(*context, decode=8, **more):
    return SavedState(
        context=_context(*context, **more),
        knobs=Knobs(workers={"decode": decode}, read_ahead_bytes=64 * MIB, prefetch_bytes=32 * MIB),
        rows_per_s=1e6,
        policy="planner",
        learned={"services": {"decode": {"points": []}}},
    )


def _unsummed(entry: SavedState) -> str:
    """A file as version 0.3 wrote it, without a checksum."""
    values = json.loads(entry.text)
    del values["crc32"]
    return json.dumps(values, indent=1)


def _context(schema="clicks", row_bytes=160.0, machine="here"):
    return KnobContext(machine=machine, schema=schema, row_bytes=row_bytes)


@pytest.fixture
def said():
    return []


@pytest.fixture(params=["folder", "uri"])
def registry(request, tmp_path, said):
    place = tmp_path / "reg"
    return Registry(place if request.param == "folder" else f"file://{place}", say=said.append)


def test_what_is_remembered_is_recalled_and_replaced(registry, said):
    assert registry.recall(_context(), LIMITS) is None
    assert registry.remember(_entry())
    assert registry.remember(_entry(decode=12))
    assert registry.recall(_context(), LIMITS) == _entry(decode=12)
    assert registry.recall(_context(machine="elsewhere"), LIMITS) is None
    assert said == []


def test_a_changed_schema_starts_from_the_nearest_scaled_by_bytes_a_row(registry):
    registry.remember(_entry("narrow", 100, decode=3))
    registry.remember(_entry("wide", 1000, decode=20))
    recalled = registry.recall(_context("new", 500), LIMITS)
    assert recalled.learned is None
    assert recalled.knobs.workers["decode"] == 20
    assert recalled.knobs.read_ahead_bytes == 32 * MIB
    assert recalled.rows_per_s == 2e6
    assert (
        registry.recall(_context("narrow", 500), LIMITS).knobs.workers["decode"] == 3
    )  # the very schema goes first


def test_what_no_longer_fits_is_brought_within_the_limits(registry):
    registry.remember(_entry(decode=60))
    tight = Limits(workers={"decode": (1, 16), "transform": (1, 4)})
    assert dict(registry.recall(_context(), tight).knobs.workers) == {"decode": 16, "transform": 1}


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda text: text[:40], "JSONDecodeError"),
        (lambda text: text.replace('"format": 4', '"format": 5'), "format 5 is not 4"),
        (lambda text: text.replace("1000000.0", '"many"'), "not a positive number"),
        (lambda text: text.replace('"decode": 8', '"decode": 0'), "not a whole number"),
        (lambda text: text.replace('"clicks"', '"others"'), "name does not fit"),
        (lambda text: text.replace('"format": 4', '"format": 3'), BY_WAY),
        (lambda text: "{}", "KeyError"),
        (lambda text: text + " " * 70_000, "too many"),
    ],
)
def test_a_damaged_foreign_or_newer_file_is_ignored_with_a_line(tmp_path, said, damage, word):
    registry = Registry(tmp_path, say=said.append)
    registry.remember(_entry())
    (path,) = tmp_path.iterdir()
    path.write_text(damage(_unsummed(_entry())))
    (tmp_path / "notes.txt").write_text("not ours")
    assert registry.recall(_context(), LIMITS) is None
    assert len(said) == 1
    assert word in said[0]
    assert registry.remember(_entry())
    assert registry.recall(_context(), LIMITS) == _entry()


def test_a_far_store_gets_as_many_fetchers_as_a_near_one_had_decoders():
    far = Limits(workers={"fetch": (1, 64), "decode": (1, 2)})
    assert far.clamp(_entry().knobs).workers == {"fetch": 8, "decode": 2}
    with raises(KnobError, "'decode'", "1 to 2", "set fetch"):
        far.check(_entry().knobs)


def test_a_state_goes_there_and_back_by_a_file_of_its_own(tmp_path):
    path = str(tmp_path / "best.json")
    check_writable(path)
    for entry in (_entry(), _entry(decode=1)):
        entry.save(path)
        assert SavedState.load(path, LIMITS) == entry
    assert [p.name for p in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize(
    ("before", "after", "facts"),
    [
        ('"decode": 8', '"decode": 65', [65, "1 to 64"]),
        ('"decode": 8', '"decdoe": 8', ["'decdoe'", "'decode'"]),
        ('"knobs"', '"knob"', ["no file of --save-knobs", "'knobs'"]),
        ("{", "# 20,774 rows/s\n[workers]\n", ["no file of --save-knobs"]),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(tmp_path, before, after, facts):
    path = tmp_path / "k.json"
    path.write_text(_unsummed(_entry()).replace(before, after))
    with raises(KnobError, path, *facts):
        SavedState.load(str(path), LIMITS)


def test_a_flipped_bit_gives_no_other_knobs():
    """Neither of a file of --save-knobs nor of a registry's entry: both are this text."""
    whole, refused = _entry().text.encode(), 0
    for bit in range(8 * len(whole)):
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        try:
            found = SavedState.parse(bytes(spoilt))
        except (ValueError, KeyError, TypeError):
            refused += 1
        else:
            assert found == _entry(), bit
    assert refused > 7.5 * len(whole)


def test_a_file_that_cannot_be_read_or_written_is_refused(tmp_path):
    with raises(KnobError, "none.json", "cannot be read"):
        SavedState.load(str(tmp_path / "none.json"), LIMITS)


@pytest.mark.slow
def test_a_registry_in_a_bucket_survives_refusals_and_its_uri_is_named_when_they_do_not_end(
    monkeypatch, said
):
    server = S3Server()
    try:
        with_bucket(server, monkeypatch)
        registry = Registry(f"s3://data/registry?{server.query}", say=said.append)
        every = "GET HEAD PUT POST DELETE"
        server.refuse(0.1, LOST, every)
        for read in (*range(1, 16), 16):
            assert registry.remember(_entry(decode=read)), said
            assert registry.recall(_context(), LIMITS).knobs.workers["decode"] == read
        assert server.refused > 3
        assert said == []
        server.refuse(1, LOST, every)
        assert not registry.remember(_entry(decode=32))
        assert registry.recall(_context(), LIMITS) is None
        assert server.refused <= 100, "retries are bounded"
        assert len(said) == 2
        assert all("s3://data/registry" in line for line in said)
        server.refuse(0)
        assert registry.recall(_context(), LIMITS).knobs.workers["decode"] == 16
    finally:
        server.close()


def test_it_stays_small(tmp_path):
    registry = Registry(tmp_path, most=3)
    for number in range(5):
        registry.remember(_entry(f"schema {number}"))
        for age, path in enumerate(sorted(tmp_path.iterdir(), key=os.path.getmtime)):
            os.utime(path, ns=(age, age))  # the clock of a file system is coarse
    assert sorted(json.loads(p.read_text())["schema"] for p in tmp_path.iterdir()) == [
        "schema 2",
        "schema 3",
        "schema 4",
    ]


def test_many_writers_leave_whole_files(tmp_path, said):
    """Twenty jobs end at once, each with a schema of its own and one that all have, in a registry that holds eight;
    others begin meanwhile."""
    gate = threading.Barrier(25, timeout=60)
    whole = []

    def write(number):
        registry = Registry(tmp_path, say=said.append, most=8)
        gate.wait()
        for turn in range(5):
            assert registry.remember(_entry(decode=1 + (number + turn) % 8))
            assert registry.remember(_entry(f"s{number}", decode=1 + number % 8))

    def read():
        gate.wait()
        for _ in range(20):
            entry = Registry(tmp_path, say=said.append).recall(_context(), LIMITS)
            whole.append(entry is None or 1 <= entry.knobs.workers["decode"] <= 8)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(20)]
    threads += [threading.Thread(target=read) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(whole) == 100
    assert all(whole)
    last = Registry(tmp_path, say=said.append, most=8)
    assert last.remember(_entry())
    assert last.recall(_context(), LIMITS) == _entry()
    assert len(list(tmp_path.iterdir())) <= 8, "nothing half written is left"
    assert said == []


def test_machines_of_one_kind_have_one_name(tmp_path, monkeypatch):
    names = []
    for name, model, cores in (("a", "Fast 3000", 4), ("b", "Fast 3000", 2), ("c", "Slow 1", 4)):
        (tmp_path / name / "proc").mkdir(parents=True)
        (tmp_path / name / "proc" / "cpuinfo").write_text(
            f"processor\t: 0\nmodel name\t: {model}\n"
        )
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        names.append(machine_fingerprint(Machine(tmp_path / name, pid=7)))
    assert names == ["Fast 3000, 4 cores", "Fast 3000, 2 cores", "Slow 1, 4 cores"]
