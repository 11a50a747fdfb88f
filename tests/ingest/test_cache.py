"""A cache of what functions over rows make: the same batches with it, empty, half full, full and damaged."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import Errors, Loader, Transform
from sluice.ingest.cache import folder as folders
from sluice.ingest.cache import made_rows
from sluice.ingest.cache.choice import CacheCosts
from sluice.ingest.cache.folder import CacheFolder
from sluice.ingest.cache.identity import digest_of
from tests.ingest import cached_functions
from tests.product import LoaderError

ROLES = "label=y;dense=size,x;id_list=parts"
GIVES = {"size": "float32", "parts": "list<int64>"}
ROWS = 4096


@pytest.fixture
def table(tmp_path):
    numbers = np.arange(ROWS)
    columns = {
        "x": numbers / 7,
        "y": numbers % 2,
        "text": [f"{'ab' * (n % 13)}{n}" for n in range(ROWS)],
    }
    for part in range(2):
        half = {name: values[part::2] for name, values in columns.items()}
        pq.write_table(pa.table(half), tmp_path / f"part-{part}.parquet", row_group_size=256)
    return str(tmp_path / "*.parquet")


@pytest.fixture(autouse=True)
def worth_it(monkeypatch):
    """What these functions cost is chance, so tests say it."""
    monkeypatch.setattr(CacheCosts, "is_worth_it", property(lambda _: True))


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The rows of all calls of `lengths` so far."""
    path = tmp_path / "calls"
    monkeypatch.setenv("CALLS_OF_LENGTHS", str(path))
    return lambda: sum(map(int, path.read_text().split())) if path.exists() else 0


def _transform(function=cached_functions.lengths, **options):
    return Transform(function, reads=["text"], gives=GIVES, **{"pure": True, **options})


def _load(table, cache=None, transform=None, **options):
    """Returns the bytes of all columns of all batches of two epochs, and what the cache did."""
    loader = Loader(
        table,
        batch_size=64,
        roles=ROLES,
        transforms=[transform or _transform()],
        tuning="fixed",
        cache=cache,
        as_="numpy",
        **options,
    )
    with loader:
        batches = [
            {name: _bytes(values) for name, values in batch.items()}
            for _ in range(2)
            for batch in loader
        ]
        return batches, loader.tunable.outcome().get("cache")


def _bytes(values):
    """The bytes of a column; those of bags come as their ids and their lengths."""
    return list(map(_bytes, values)) if isinstance(values, tuple) else np.asarray(values).tobytes()


def _entries(cache):
    return sorted(cache.glob("*.arrow"))


def test_batches_are_the_same_while_it_fills_when_it_is_full_half_full_and_damaged(
    table, tmp_path, calls, capsys
):
    cache = tmp_path / "cache"
    plain, nothing = _load(table)
    assert nothing is None
    filled, figures = _load(table, cache)
    assert filled == plain
    assert figures["rows_made"] + figures["rows_read"] == 2 * ROWS
    assert figures["rows_read"] >= ROWS / 2, "the second epoch computes again"
    assert len(_entries(cache)) == 16

    before = calls()
    full, figures = _load(table, cache)
    assert full == plain
    assert calls() - before < figures["rows_made"] + 100, "only a sample is computed twice"
    assert figures["rows_read"] >= ROWS

    for path in _entries(cache)[::2]:
        path.unlink()
    half, figures = _load(table, cache)
    assert half == plain
    assert 0 < figures["rows_read"] <= 1.5 * ROWS
    assert len(_entries(cache)) == 16

    for path in _entries(cache):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    assert _load(table, cache)[0] == plain
    assert "is damaged; its rows are computed again" in capsys.readouterr().err
    assert _load(table, cache)[0] == plain
    assert "is damaged" not in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_a_folder_and_find_what_others_have_made(table, tmp_path, ranks):
    cache = tmp_path / "cache"
    plain = [_load(table, rank=rank, ranks=ranks)[0] for rank in range(ranks)]
    folders_of_others = [CacheFolder(cache, 2**30) for _ in range(2)]
    assert [_load(table, cache, rank=rank, ranks=ranks)[0] for rank in range(ranks)] == plain
    entries = _entries(cache)
    assert len(entries) == 16
    assert all(folder.get(path.stem) for folder in folders_of_others for path in entries)
    batches, figures = _load(table, cache)
    assert batches == _load(table)[0]
    assert figures["rows_read"] >= ROWS, "another number of ranks finds them, too"


def test_processes_that_share_a_folder_keep_its_limit(tmp_path):
    entry, limit = pa.table({"x": np.arange(1000)}), 40 * 9000
    first, second = CacheFolder(tmp_path / "made", limit), CacheFolder(tmp_path / "made", limit)
    for number in range(40):
        first.put(f"a{number}", entry)
        second.put(f"b{number}", entry)
    held = sum(path.stat().st_size for path in _entries(tmp_path / "made"))
    assert 0.9 * limit < held <= limit * (1 + 2 / 32)
    assert second.get("b39").equals(first.get("b39"))
    assert first.get("a0") is None


def test_a_changed_function_file_or_dependency_is_computed_again(
    table, tmp_path, monkeypatch, calls
):
    cache, number = tmp_path / "cache", tmp_path / "number"
    number.write_text("1")
    monkeypatch.setenv("NUMBER_FILE", str(number))
    depends = _transform(cached_functions.from_file, depends=[number])
    first = _load(table, cache, depends)[0]
    number.write_text("2")
    assert _load(table, cache, depends)[0] == _load(table, None, depends)[0] != first
    assert len(_entries(cache)) == 32

    monkeypatch.setattr(cached_functions, "FACTOR", 5)  # a value that the function's code names
    assert _load(table, cache, depends)[0] == _load(table, None, depends)[0]
    assert len(_entries(cache)) == 48

    part = Path(table).with_name("part-0.parquet")
    before = os.stat(part)
    os.utime(part, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert _load(table, cache, depends)[1]["rows_read"] <= 1.5 * ROWS
    assert len(_entries(cache)) == 56


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("from .deep import made\n", "deep"),
        ("from . import deep\n\ndef made(rows):\n    return deep.made(rows)\n", "deep"),
        ("def made(rows):\n    from {name}.deep import made\n    return made(rows)\n", "deep"),
        ("from . import between\n\ndef made(rows):\n    return between.deep.made(rows)\n", "deep"),
        ("def made(rows):\n    return rows\n", "call"),
    ],
)
def test_a_change_of_any_module_of_ours_changes_the_digest(tmp_path, monkeypatch, code, changed):
    """Also in a package with a version, which nobody raises at each change."""
    folder = tmp_path / f"own_{tmp_path.name.replace('-', '_')}"
    folder.mkdir()
    parts = {"__init__": "__version__ = '1'\n", "between": "from . import deep\n"}
    parts |= {"deep": "def made(rows):\n    return rows\n", "call": code.format(name=folder.name)}
    for part, text in parts.items():
        (folder / f"{part}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    transform = _transform(f"{folder.name}.call:made")
    before = digest_of([transform], ["size"])
    assert digest_of([transform], ["size"]) == before
    with (folder / f"{changed}.py").open("a") as file:
        file.write("# changed\n")
    assert digest_of([transform], ["size"]) != before


SPEC = """
[input]
format = "parquet"
columns = ["text:text", "x:float", "y:int", "part:text"]

[table]
split_column = "part"
split = {train = 0.5, valid = 0.5}

[[column]]
name = "y"
role = "label"

[[column]]
name = "x"
role = "dense"
ops = [{op = "fill", value = 0}]
"""


def test_each_split_of_a_file_has_its_own_entries(tmp_path):
    """Each row group has as many rows of one split as of the other one."""
    spec, cache, numbers = tmp_path / "spec.toml", tmp_path / "cache", np.arange(512)
    spec.write_text(SPEC)
    parts = [("train", "valid")[n % 2] for n in range(512)]
    columns = {
        "x": numbers / 7,
        "y": numbers // 2 % 2,
        "part": parts,
        "text": list(map(str, range(512))),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=64)
    number = Transform(cached_functions.number, reads=["text"], gives={"x": "float64"}, pure=True)
    options = {"batch_size": 8, "spec": spec, "transforms": [number], "tuning": "fixed"}
    for split, entries in (("train", 8), ("valid", 16)):
        seen = []
        for place in (None, cache):
            with Loader(tmp_path, split=split, cache=place, as_="numpy", **options) as loader:
                seen.append([batch["x"].tobytes() for batch in loader])
        assert seen[0] == seen[1]
        assert len(_entries(cache)) == entries


def test_rows_that_fail_are_quarantined_and_their_reads_are_not_kept(table, tmp_path):
    def errors(name):
        return Errors(on_error="quarantine", quarantine=tmp_path / name, max_rate=1.0)

    cache, failing = tmp_path / "cache", _transform(cached_functions.failing)
    plain = _load(table, None, failing, errors=errors("plain"))[0]
    for name in ("first", "second"):
        assert _load(table, cache, failing, errors=errors(name))[0] == plain
    lines = [(tmp_path / name).read_text().splitlines() for name in ("plain", "first", "second")]
    assert len(lines[0]) == len(lines[1]) == len(lines[2]) > 300
    assert len(_entries(cache)) == 8  # each read of the other part has such rows


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (cached_functions.of_all_rows, "'size' depends on the other rows of a call"),
        (cached_functions.with_global, "reads the global 'SEEN' of tests.ingest.cached_functions"),
        (
            cached_functions.with_object,
            "reads the global 'TOKENS' of tests.ingest.cached_functions",
        ),
        (lambda rows: dict(cached_functions.lengths(rows)), "cannot be imported by its name"),
    ],
)
def test_what_is_not_pure_is_never_kept(table, tmp_path, capsys, function, why):
    cache, transform = tmp_path / "cache", _transform(function)
    if function is not cached_functions.with_global:
        assert len(_load(table, cache, transform)[0]) == 2 * ROWS // 64
    else:
        Loader(table, batch_size=64, roles=ROLES, transforms=[transform], cache=cache).close()
    assert why in capsys.readouterr().err
    assert not _entries(cache)
    _load(table, cache, _transform(pure=False))
    assert "no function over rows is marked pure=True" in capsys.readouterr().err


def test_a_full_disk_ends_the_writing_and_not_the_run(table, tmp_path, monkeypatch, capsys):
    cache, plain = tmp_path / "cache", _load(table)[0]

    def full(_from, _to):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", full)
    assert _load(table, cache)[0] == plain
    assert capsys.readouterr().err.count("no more entries are written (No space left") == 1
    assert not list(cache.iterdir())


def test_a_folder_that_is_gone_ends_the_writing_and_not_the_run(tmp_path, capsys):
    cache, entry = CacheFolder(tmp_path / "made", 2**20), pa.table({"x": [1]})
    cache.put("a", entry)
    (tmp_path / "made").rename(tmp_path / "gone")
    cache.put("b", entry)
    assert cache.get("a") is None
    assert "no more entries are written (No such file" in capsys.readouterr().err


def test_parts_of_an_ended_process_go_and_the_least_used_entries_make_room(tmp_path):
    (tmp_path / "made").mkdir(mode=0o700)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        (tmp_path / "made" / f"torn-{pid}-1.part").write_bytes(b"half")
    (tmp_path / "made" / "another.part").write_bytes(b"of a user")
    entry = pa.table({"x": np.arange(1000)})
    cache = CacheFolder(tmp_path / "made", 3 * 9000)
    for name in "abc":
        cache.put(name, entry)
    assert cache.get("a").equals(entry)
    cache.put("d", entry)
    assert [path.stem for path in _entries(tmp_path / "made")] == ["a", "c", "d"]
    assert cache.get("b") is None
    left = {path.name for path in (tmp_path / "made").glob("*.part")}
    assert left == {"another.part", f"torn-{os.getpid()}-1.part"}, "this process may still write it"


def test_a_killed_writer_leaves_whole_entries(tmp_path):
    writes = (
        "import itertools, pathlib, sys, pyarrow as pa\n"
        "from sluice.ingest.cache.folder import CacheFolder\n"
        "cache = CacheFolder(pathlib.Path(sys.argv[1]), 2**30)\n"
        "for number in itertools.count():\n"
        "    cache.put(f'entry{number}', pa.table({'x': range(20_000)}))\n"
        "    print(number, flush=True)\n"
    )
    for attempt in range(3):
        place = tmp_path / f"made{attempt}"
        with subprocess.Popen(
            [sys.executable, "-c", writes, place], stdout=subprocess.PIPE, text=True
        ) as writer:
            for _ in range(5 + attempt):
                assert writer.stdout.readline()
            writer.kill()
        again = CacheFolder(place, 2**30)
        names = [path.stem for path in _entries(place)]
        assert len(names) >= 5
        assert all(again.get(name).num_rows == 20_000 for name in names)


@pytest.mark.parametrize(
    ("mode", "uid", "kind", "why"),
    [
        (0o755, None, "ext4", "chmod 700"),
        (0o700, 12345, "ext4", "belongs to another user"),
        (0o700, None, "tmpfs", "tmpfs is memory"),
    ],
)
def test_folders_that_are_no_place_for_a_cache_are_refused(
    *, tmp_path, monkeypatch, mode, uid, kind, why
):
    place = tmp_path / "made"
    place.mkdir()
    place.chmod(mode)
    if uid:
        monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(LoaderError, match=why):
        CacheFolder(place, 2**20, lambda _: kind)
    assert folders.file_system_of(Path("/proc")) == "proc"


@pytest.mark.parametrize(
    ("made", "read", "written", "passes", "kept"),
    [
        (20e-6, 0.3e-6, 0.5e-6, 1, True),
        (0.5e-6, 0.3e-6, 0.5e-6, 1, False),
        (0.5e-6, 0.1e-6, 0.3e-6, 9, True),
        (20e-6, 0.3e-6, 0.5e-6, 0, False),
    ],
)
def test_what_is_cheap_to_make_is_not_kept(*, made, read, written, passes, kept, monkeypatch):
    monkeypatch.undo()
    costs = CacheCosts(made_s=made, read_s=read, written_s=written, passes=passes)
    assert costs.is_worth_it is kept
    assert ("is kept" in costs.describe("'f'")) is kept


def test_entries_of_a_function_that_turned_out_cheap_go_again(table, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(CacheCosts, "is_worth_it", property(lambda _: False))
    cache = tmp_path / "cache"
    assert _load(table, cache)[0] == _load(table)[0]
    assert "what 'lengths' makes is not kept in the cache: a row costs" in capsys.readouterr().err
    assert not _entries(cache)


def test_a_resumed_run_has_the_same_batches(table, tmp_path):
    cache = tmp_path / "cache"
    options = {"batch_size": 64, "roles": ROLES, "transforms": [_transform()], "tuning": "fixed"}
    with Loader(table, as_="numpy", **options) as whole:
        plain = [batch["size"].tobytes() for batch in whole]
    for _ in range(2):
        with Loader(table, cache=cache, as_="numpy", **options) as loader:
            batches = iter(loader)
            seen = [next(batches)["size"].tobytes() for _ in range(20)]
            state = loader.state_dict()
        with Loader(table, cache=cache, as_="numpy", **options) as again:
            again.load_state_dict(state)
            assert seen + [batch["size"].tobytes() for batch in again] == plain
    assert made_rows.AUTO == "auto"
