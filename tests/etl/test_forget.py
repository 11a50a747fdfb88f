"""`sluice forget`: a value leaves a table's folder, whole or not at all, and nothing else changes."""

import random
import shutil
import time
from pathlib import Path

import pytest

import sluice.etl.jobs.erasure as erasure_file
from sluice.common.errors import RunFailure
from sluice.etl.jobs.erasure import Erasure
from sluice.etl.table import commit
from sluice.tools.forget import main
from tests.etl.forgotten import files_with
from tests.etl.jobs import build_table, opened, rows_of, run, words_of
from tests.etl.tables import column, put, section, write_rows, write_spec
from tests.product import NOTHING, CommitConflict, JobRecord, Pin, Serving, TableStore, UsageError
from tests.raises import MISTAKES, raises

GONE = "visitor-4711"
CHAINS = {
    "categorify": ("sparse", "categorify"),
    "rare": ("sparse", "categorify, min_count = 3, oov = 4"),
    "lower": ("sparse", "lower; categorify"),
    "hash": ("sparse", "hash, size = 7"),
    "online": ("sparse", "hash, size = 7, online = true"),
    "count": ("dense", "count; fill"),
    "share": ("dense", "count, share = true; fill"),
    "target": ("dense", "target"),
    "key": ("key", ""),
}
PAIRS = {
    "pair": ("sparse", "concat; categorify"),
    "pair_target": ("dense", "concat; target"),
    "cross": ("sparse", "cross, size = 9"),
}
"""Chains of several columns."""


def write_log(path: Path, rows: list[tuple[int, int, str, int]]) -> Path:
    lines = (",".join(map(str, row)) for row in rows)
    return put(path, "click,row,user,item\n" + "\n".join(lines) + "\n")


def draw_log(draw: random.Random, first: int, rows: int) -> list[tuple[int, int, str, int]]:
    users = [GONE, *(f"visitor-{number}" for number in range(draw.randint(1, 12)))]
    return [
        (draw.randint(0, 1), first + number, draw.choice(users), draw.randint(0, 5))
        for number in range(rows)
    ]


def spec_of(
    chains: list[str], table: str = 'split = {train = 0.7, test = 0.3}\nkey = "row"'
) -> str:
    return write_spec(
        "click:int row:int user:text item:int",
        column("row", "time"),
        *(column(f"of_{name}", *CHAINS[name], source="user") for name in chains),
        *(column(name, *chain, source=["item", "user"]) for name, chain in PAIRS.items()),
        column("item", "sparse", "categorify"),
        form="csv",
        head="header = true\n",
        table=table,
    )


def forget(folder: Path, *words: str, key: str = f"user={GONE}"):
    return main([str(folder), "--key", key, *words])


@pytest.mark.parametrize("seed", range(12))
def test_of_drawn_tables_a_key_leaves_every_file_and_the_rows_of_others_stay_as_they_are(
    tmp_path, seed
):
    draw = random.Random(seed)
    table = tmp_path / "table"
    own = draw.choice(["key", "categorify"])
    chains = sorted({own, *draw.sample(sorted(CHAINS), draw.randint(0, len(CHAINS)))})
    text = spec_of(chains)
    first = draw_log(draw, 0, draw.randint(20, 60))
    first += [(1, 900, GONE, 1), (0, 901, f"{GONE}0", 1)]
    log = write_log(tmp_path / "log.csv", [*first, (7, 902, GONE, 1)])
    options = {"max_rejects": 0.5}
    build_table(None, table, log, text=text, **options)
    rows, more = list(first), draw.randint(0, 2)
    for number in range(more):
        added = draw_log(draw, 1000 * (number + 1), draw.randint(5, 30))
        path = write_log(tmp_path / f"log-{number}.csv", added)
        run(
            None, table, path, text=text, mode="append", update_state=draw.random() < 0.7, **options
        )
        rows += added
    splits = opened(table).splits
    before = {split: rows_of(table, split) for split in splits}
    users = {row: user for _, row, user, _ in rows}
    assert files_with(table, GONE)
    sizes = {f.name: f.cardinality for f in opened(table).fields}
    pairs = words_of(table, "pair/1")
    own_id = not words_of(table, "of_categorify/0").count(GONE) if own == "categorify" else False
    told = forget(table, *(["--shared"] if own_id else []))
    after = rows_of(table)
    assert files_with(table, GONE) == []
    for before_it, after_it in zip(pairs, words_of(table, "pair/1"), strict=True):
        assert (before_it == after_it) == (before_it.partition("\x1f")[2] != GONE)
    if not told["shared"]:
        for split in splits:
            kept = [row for row in before[split] if users[int(row["row"])] != GONE]
            assert [row for row in after if row in before[split]] == kept
    assert told["rows"] == sum(map(len, before.values())) - len(after)
    assert sizes == {f.name: f.cardinality for f in opened(table).fields}
    assert opened(table).check() == []
    assert {v.version for v in opened(table).history()} == {told["version"]}
    # Values that come later get new ids, or one that they share.
    late = write_log(tmp_path / "late.csv", [(1, 7000, GONE, 1), (0, 7001, "new", 2)])
    run(None, table, late, text=text, mode="append", update_state=True)
    for name in ("categorify", "lower"):
        if name in chains:
            ids = {row["row"]: row[f"of_{name}"] for row in rows_of(table)}
            assert {ids[7000], ids[7001]} <= {2, sizes[f"of_{name}"], sizes[f"of_{name}"] + 1}


def small(folder: Path, *chains: str, users: tuple[str, ...] = (GONE, "a", "b")) -> str:
    """Makes a table of two versions, with rejected rows."""
    text = spec_of(list(chains) or ["categorify"])
    rows = [(number % 2, number, users[number % len(users)], 1) for number in range(30)]
    log = write_log(folder / "log.csv", [*rows, (7, 99, GONE, 1)])
    for mode in ("create", "overwrite"):
        more = {"update_state": True} if mode == "overwrite" else {}
        build_table(None, folder / "table", log, text=text, mode=mode, max_rejects=0.5, **more)
    return text


class Killed(BaseException):
    pass


def test_a_kill_at_any_moment_leaves_a_whole_version_and_a_second_call_finishes(
    tmp_path, monkeypatch
):
    small(tmp_path, "categorify", "target")
    moments, left = 0, 10**9

    def counted(function):
        def call(*args, **more):
            nonlocal moments, left
            moments, left = moments + 1, left - 1
            if left < 0:
                raise Killed
            return function(*args, **more)

        return call

    monkeypatch.setattr(TableStore, "write", counted(TableStore.write))
    monkeypatch.setattr(TableStore, "remove", counted(TableStore.remove))
    monkeypatch.setattr(erasure_file, "write_file", counted(erasure_file.write_file))
    monkeypatch.setattr(commit, "_commit", counted(commit._commit))
    before = rows_of(tmp_path / "table")
    for moment in range(100):
        folder = tmp_path / "again" / "table"
        shutil.copytree(tmp_path / "table", folder)
        left = moment
        try:
            told = forget(folder)
        except Killed:
            left = 10**9
            rows = rows_of(folder)
            assert rows == before or len(rows) == 20
            told = forget(folder)
        else:
            assert moment > 10
            return
        assert (told["rows"], told["learned"] > 0, told["shared"]) == (10, True, False), moment
        assert files_with(folder, GONE) == []
        assert len(rows_of(folder)) == 20
        assert opened(folder).check() == []
        shutil.rmtree(folder.parent)
    pytest.fail("it never ended")


def test_a_call_that_was_broken_off_is_finished_before_another_key(tmp_path, monkeypatch):
    small(tmp_path)
    table = tmp_path / "table"
    with monkeypatch.context() as patch:
        patch.setattr(erasure_file, "vacuum", lambda *_, **__: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            forget(table)
    with raises(UsageError, "another --key", opened(table).version):
        forget(table, key="user=a")
    forget(table)
    assert forget(table, key="user=a")["rows"] == 10


def test_a_version_that_is_read_stays_and_its_reader_is_named(tmp_path):
    small(tmp_path)
    table, store = tmp_path / "table", TableStore(tmp_path / "table")
    before = sorted(table.rglob("*"))
    Pin(name="train-7", version=1, expires=time.time() + 60).save(store)
    with raises(UsageError, "train-7", "version 1", "nothing was removed"):
        forget(table)
    Pin(name="train-7", version=1, expires=0.0).release(store)
    assert sorted(path for path in table.rglob("*") if path.name != "pins") == before


def test_a_version_that_is_pinned_meanwhile_is_named_and_a_second_call_removes_it(tmp_path):
    small(tmp_path)
    table, store = tmp_path / "table", TableStore(tmp_path / "table")
    erasure = Erasure(store=store, column="user", value=GONE, permission=NOTHING, shared=False)
    removed = erasure.publish(time.time())
    pin = Pin(name="late", version=1, expires=time.time() + 60)
    pin.save(store)
    with raises(RunFailure, "version 1", "pinned"):
        erasure.finish(removed, time.time())
    assert files_with(table, GONE)
    pin.release(store)
    assert forget(table)["rows"] == 10
    assert files_with(table, GONE) == []


@pytest.mark.parametrize("chain", ["hash", "online", "rare", "lower"])
def test_rows_that_others_share_are_removed_only_if_asked(tmp_path, chain):
    small(tmp_path, chain, users=(GONE, *(f"u{number}" for number in range(14))))
    table = tmp_path / "table"
    before = sorted(map(str, table.rglob("*.parquet")))
    if chain != "online":  # which stores the text
        with raises(UsageError, f"of_{chain}", "--shared", "nothing was removed"):
            forget(table)
        assert sorted(map(str, table.rglob("*.parquet"))) == before
    told = forget(table, "--shared")
    assert told["rows"] >= 2
    assert bool(told["shared"]) == (chain != "online")
    assert files_with(table, GONE) == []


def test_a_value_that_is_nowhere_is_said_and_old_versions_go_all_the_same(tmp_path):
    small(tmp_path)
    told = forget(tmp_path / "table", key="user=nobody-at-all")
    assert (told["rows"], told["learned"]) == (0, 0)
    assert rows_of(tmp_path / "table")


@pytest.mark.parametrize(
    ("key", "facts"),
    MISTAKES["forget"],
)
def test_a_wrong_key_is_refused_by_name(tmp_path, key, facts):
    small(tmp_path)
    with raises(UsageError, *facts):
        forget(tmp_path / "table", key=key)


def test_a_spec_that_names_the_value_is_refused(tmp_path):
    text = spec_of(["categorify"]) + section("filter", column="user", op="!=", value="b")
    log = write_log(tmp_path / "log.csv", [(n % 2, n, "abc"[n % 3], 1) for n in range(20)])
    build_table(None, tmp_path / "table", log, text=text)
    with raises(UsageError, "spec", "--key"):
        forget(tmp_path / "table", key="user=b")


def test_other_columns_that_may_hold_the_value_are_named(tmp_path):
    text = write_spec(
        "click:int user:text friend:text",
        column("user", "sparse", 'categorify, joint = "people"'),
        column("friend", "sparse", 'categorify, joint = "people"'),
        form="csv",
        head="header = true\n",
    )
    log = put(tmp_path / "log.csv", f"click,user,friend\n1,{GONE},a\n0,a,{GONE}\n1,b,a\n")
    build_table(None, tmp_path / "table", log, text=text)
    with raises(UsageError, "friend", "--refit", "nothing was removed"):
        forget(tmp_path / "table")
    put(log, "click,user,friend\n0,a,b\n1,b,a\n")
    run(None, tmp_path / "table", log, text=text, mode="overwrite", refit=True)
    assert forget(tmp_path / "table", "--shared")["rows"] == 0
    assert files_with(tmp_path / "table", GONE) == []


def test_a_vocabulary_of_parts_is_named(tmp_path):
    """An element may be of other values, too."""
    parts = column("parts", "id_list", 'split, separator = "+"; categorify', "user")
    log = write_log(tmp_path / "log.csv", [(1, 0, GONE, 1), (0, 1, f"a+{GONE}", 1)])
    build_table(None, tmp_path / "table", log, text=spec_of(["key"]) + parts)
    with raises(UsageError, "parts", "--refit", "nothing was removed"):
        forget(tmp_path / "table")


def test_an_append_that_began_before_is_refused(tmp_path, monkeypatch):
    """Its rows may be those of the key."""
    text = small(tmp_path, "key")
    table, put = tmp_path / "table", commit._commit
    log = write_log(tmp_path / "more.csv", [(1, 500, GONE, 1)])

    def meanwhile(store, base, record: JobRecord, stored):
        if record.mode == "append" and base.version == 1:
            forget(table)
        put(store, base, record, stored)

    monkeypatch.setattr(commit, "_commit", meanwhile)
    with raises(CommitConflict, "version 2"):
        run(None, table, log, text=text, mode="append")
    assert files_with(table, GONE) == []


@pytest.mark.spark
def test_what_a_server_knows_of_other_rows_goes_and_what_of_others_stays(spark, tmp_path):
    side = write_rows(tmp_path / "side.parquet", user=[GONE, "a"], age=[30, 40], key=[1, 2])
    text = write_spec(
        "click:int user:text item:int at:int",
        section("join", path=str(side), on="user", columns=["age:int", "key:int"]),
        section("history", name="past", of="item", by="user", order="at", length=3),
        column("user", "sparse", "categorify"),
        column("age", "dense", "fill"),
        column("key", "dense", "fill"),
        column("past", "id_list", "hash, size = 9"),
    )
    rows = [{"click": n % 2, "user": (GONE, "a")[n % 2], "item": n, "at": n} for n in range(12)]
    build_table(spark, tmp_path / "table", write_rows(tmp_path / "log.parquet", rows), text=text)
    before = Serving.open(opened(tmp_path / "table"))
    told = forget(tmp_path / "table")
    assert (told["rows"], told["served"]) == (6, 2)
    assert files_with(tmp_path / "table", GONE) == []
    after = Serving.open(opened(tmp_path / "table"))
    assert after.records.keys() == before.records.keys()
    more = [{**rows[n], "at": n + 20} for n in range(2)]
    run(
        spark,
        tmp_path / "table",
        write_rows(tmp_path / "b.parquet", more),
        text=text,
        mode="append",
    )
    lists = {row["user"]: len(row["past"]) for row in rows_of(tmp_path / "table")[-2:]}
    assert sorted(lists.values()) == [0, 12]
