"""The cache: its limit holds, a scan never thrashes it, what is broken is fetched anew, foreign files are safe."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sluice.ingest.read.cache import FileCache

ROOT = Path(__file__).resolve().parents[2]
ENTRY = 100_000
ON_DISK = 102_400  # whole blocks


def on_disk(folder):
    return sum(
        -(-p.stat().st_size // 4096) * 4096
        for p in folder.rglob("*")
        if len(p.name.split(".")[0]) == 64
    )


def payload(number):
    return bytes([number % 256]) * ENTRY


def scan(cache, numbers):
    """Reads as a store does; the share that hit."""
    hits = 0
    for number in numbers:
        data = cache.get(f"range {number}")
        hits += data is not None
        assert data in (None, payload(number))
        if data is None:
            cache.put(f"range {number}", payload(number))
    return hits / len(numbers)


@pytest.mark.parametrize("fits", [1, 5, 10, 20])
def test_hit_rate_of_a_scan_is_the_share_that_fits(tmp_path, fits):
    with FileCache(tmp_path, fits * ON_DISK, "table") as cache:
        assert scan(cache, range(20)) == 0
        for _ in range(3):
            assert scan(cache, range(20)) == fits / 20
        assert cache.bytes == on_disk(tmp_path) == fits * ON_DISK
    with FileCache(tmp_path, fits * ON_DISK, "table") as cache:
        assert scan(cache, range(20)) == fits / 20, "it outlives the process that filled it"


def test_the_limit_holds_for_threads_and_processes_together(tmp_path):
    limit = 7 * ON_DISK
    code = f"""if True:
        from sluice.ingest.read.cache import FileCache
        from tests.ingest.test_cache import scan
        with FileCache({str(tmp_path)!r}, {limit}, "table") as cache:
            input()
            scan(cache, range(30))
    """
    others = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT)
        for _ in range(2)
    ]
    with FileCache(tmp_path, limit, "table") as cache:
        for other in others:
            other.stdin.write(b"\n")
            other.stdin.flush()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: scan(cache, range(30)), range(4)))
        for other in others:
            other.communicate()
            assert other.returncode == 0
        assert cache.bytes == on_disk(tmp_path) == limit
        assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda d, _: d[:-1],
        lambda d, _: d[:50] + b"\xff" + d[51:],
        lambda d, _: b"",
        lambda d, _: b"x" + d[1:],
        lambda _, other: other,
    ],
    ids=["cut", "flipped", "empty", "header", "of another range"],
)
def test_a_broken_entry_is_dropped_and_fetched_anew(tmp_path, damage):
    with FileCache(tmp_path, 10 * ON_DISK, "table") as cache:
        scan(cache, (1, 2))
        entry, other = (cache._path(f"range {number}") for number in (1, 2))
        entry.write_bytes(damage(entry.read_bytes(), other.read_bytes()))
        assert cache.get("range 1") is None
        assert not entry.exists()
        assert scan(cache, (1, 2)) == 1 / 2
        assert scan(cache, (1, 2)) == 1
        assert cache.stats()["cache_corrupt"] == 1


def test_another_data_set_is_evicted_only_when_it_is_not_read(tmp_path):
    limit = 4 * ON_DISK
    with FileCache(tmp_path, limit, "old") as old:
        scan(old, range(4))
        with FileCache(tmp_path, limit, "new") as new:
            assert [scan(new, range(4)), scan(new, range(4))] == [0, 0], (
                "no room: the other one is in use"
            )
        assert scan(old, range(4)) == 1
    with FileCache(tmp_path, limit, "new") as new:
        scan(new, range(4))
        assert scan(new, range(4)) == 1
        assert on_disk(tmp_path) == limit


def test_it_deletes_only_its_own_files(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with FileCache(tmp_path, 2 * ON_DISK, "a") as cache:
        scan(cache, range(2))
        home = cache._home
    (home / "notes.txt").write_text("mine too")
    (home / ("0" * 64)).symlink_to(tmp_path / "precious")
    with FileCache(tmp_path, 2 * ON_DISK, "b") as cache:
        scan(cache, range(2))
        assert scan(cache, range(2)) == 1
    assert (tmp_path / "precious").read_text() == "mine"
    assert (home / "notes.txt").exists()


def test_what_a_killed_process_left_half_done_is_swept_and_counted_anew(tmp_path):
    with FileCache(tmp_path, 3 * ON_DISK, "table") as cache:
        scan(cache, range(1))
        home = cache._home
    (home / ("a" * 64 + "." + "b" * 32 + ".part")).write_bytes(b"half")
    (home / "ledger").write_text(str(3 * ON_DISK))  # it had reserved room that it never used
    with FileCache(tmp_path, 3 * ON_DISK, "table") as cache:
        assert not list(home.glob("*.part"))
        assert cache.bytes == ON_DISK
        scan(cache, range(3))
        assert scan(cache, range(3)) == 1


def test_a_full_disk_costs_the_cache_not_the_run(tmp_path, monkeypatch):
    with FileCache(tmp_path, 10 * ON_DISK, "table") as cache:
        scan(cache, range(2))

        def full(*_args, **_options):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.link", full)
        scan(cache, range(5))
        monkeypatch.undo()
        assert scan(cache, range(5)) == 2 / 5
        assert cache.stats()["cache_refused"] == 1
        assert cache.bytes == 2 * ON_DISK
