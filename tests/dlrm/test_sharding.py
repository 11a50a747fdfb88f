from __future__ import annotations

import json

import pytest

from dlrm.config import ConfigError, Table
from dlrm.sharding import describe, place

CRITEO = [Table(name=f"C{i}", rows=n, width=16) for i, n in enumerate(
    [300, 500, 20_000, 6000, 100, 7, 9000, 200, 3, 6000, 4000, 18_000, 2500, 26, 5000, 15_000, 10, 2000, 400, 3], 1)]


def load(placements, ranks, what):
    return [sum(getattr(p, what)(r) for p in placements) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_auto_balances_bytes_and_cuts_only_big_tables(ranks):
    placements = place(CRITEO, ranks, "auto")
    assert {p.kind for p in placements} == {"row", "table"}
    small = [p.table.rows for p in placements if p.kind == "table"]
    assert max(small) <= min(p.table.rows for p in placements if p.kind == "row")
    for what in ("bytes_on", "lookups_on"):
        held = load(placements, ranks, what)
        assert sum(held) == pytest.approx(sum(t.bytes if what == "bytes_on" else 1 for t in CRITEO))
    assert max(load(placements, ranks, "bytes_on")) <= 1.1 * sum(t.bytes for t in CRITEO) / ranks


def test_auto_on_one_rank_keeps_tables_whole():
    assert {(p.kind, p.ranks) for p in place(CRITEO, 1, "auto")} == {("table", (0,))}


def test_a_table_of_fewer_rows_than_ranks_is_never_cut():
    placements = place([Table(name="a", rows=3, width=16)], 8, "auto")
    assert placements[0].kind == "table"


@pytest.mark.parametrize("how", ["row", "table", "column"])
def test_what_is_asked_for_is_done(how):
    tables = CRITEO[:4]
    assert {p.kind for p in place(tables, 2, how)} == {how}


def test_a_file_decides_for_the_columns_it_names(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"C3": "table", "C5": "row", "C1": "column"}))
    kinds = {p.table.name: p.kind for p in place(CRITEO, 2, str(file))}
    assert (kinds["C3"], kinds["C5"], kinds["C1"], kinds["C12"]) == ("table", "row", "column", "row")


@pytest.mark.parametrize(("text", "message"), [
    ('{"C33": "row"}', r"no column 'C33' \(did you mean 'C3'"), ('{"C3": "rows"}', "'C3': kind 'rows'.*'row'"),
    ("[1]", "not an object"), ("{", "not a readable JSON")])
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, message):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        place(CRITEO, 2, str(file))


@pytest.mark.parametrize(("how", "ranks", "message"), [
    ("column", 8, "width 16 cannot be cut into 8"), ("row", 4, "'C9': 3 rows cannot be cut over 4"),
    ("rowwise", 2, "'rowwise' is none of auto")])
def test_what_cannot_be_is_refused_by_name(how, ranks, message):
    with pytest.raises(ConfigError, match=message):
        place(CRITEO, ranks, how)


def test_the_printed_plan_names_every_table_and_each_ranks_load():
    text = describe(place(CRITEO, 2, "auto"), 2)
    assert all(t.name in text for t in CRITEO)
    assert text.count("lookups a row") == 2
    assert "least loaded rank" in text
