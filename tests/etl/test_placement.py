"""Operators are applied where a run says that they belong, and the rows that come out are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.agent.report.run_folder import RunError
from sluice.common.errors import UsageError
from sluice.common.settings import OptionError, parse
from sluice.etl.apply import column_costs
from sluice.etl.apply.column_costs import ways
from sluice.etl.job_request import JobRequest
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.spec.columns import leave_to_loader
from sluice.etl.spec.placement import placement_of, with_placement
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.synth.raw_logs import synthesize
from sluice.etl.table.commit import CommitError
from sluice.etl.table.table import FeatureTable
from sluice.ingest.loader import BatchLoader
from sluice.ingest.read.packed_copy import PackedCopy
from sluice.ingest.read.sources import Reading
from sluice.ingest.row_order import Order
from sluice.tools.packing import packing
from sluice.tools.placing import CannotPlace, placed
from tests.etl.jobs import Said
from tests.etl.tables import column, write_spec
from tests.raises import assert_names, raises

SPEC = write_spec(
    "label:int I1..I13:int C1..C26:text",
    column("I*", "dense", "fill, value = 0; clip, low = -2; log, shift = 3"),
    column("C*", "sparse", "categorify, min_count = 4"),
    column("C12", "sparse", "hash, size = 1000"),
    column("pair", "sparse", "cross, size = 1000", ["C1", "C2"]),
    form="tsv",
    table="split = {train = 0.8, test = 0.2}",
)


def ran(folder: Path, table: Path | None, *, demand: float = 0.0) -> Path:
    """A run folder whose run was over that table, in which reading took 2 µs a row."""
    stages = {
        "read": {"workers": 1, "busy": 0.5, "cpu": 0.5},
        "shuffle": {"workers": 1, "busy": 0.5, "cpu": 0.5},
    }
    rate = min(5e5, demand or 5e5)
    stages = {n: {**s, "busy": rate * 1e-6, "cpu": rate * 1e-6} for n, s in stages.items()}
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"kind": "load", "data": str(table), "version": 0})
    )
    (folder / "metrics.jsonl").write_text(
        json.dumps(
            {
                "kind": "loader",
                "at": 1.0,
                "cpu_quota": 2.0,
                "rows_per_s": rate,
                "stall": 0.0,
                "cpu": rate * 2e-6,
                "knobs": {"fused": ["shuffle"]},
                "demand_rows_per_s": demand or None,
                "stages": stages,
            }
        )
        + "\n"
    )
    return folder


def answer(tmp_path: Path, words: str, *, text: str = SPEC, said: Said | None = None) -> dict:
    (tmp_path / "spec.toml").write_text(text)
    argv = f"--spec {tmp_path}/spec.toml --input {tmp_path}/log --engine local {words}".split()
    request = parse(JobRequest, argv=argv, prog="sluice etl")
    return request.answer(JobProgress(said or Said()), argv, placed, packing)


def test_the_placed_table_gives_the_same_batches_and_an_append_lies_as_it_does(tmp_path):
    synthesize(tmp_path / "log", rows=3000, seed=2)
    answer(tmp_path, f"--output {tmp_path}/etl")
    said = Said()
    run = ran(tmp_path / "run", tmp_path / "etl", demand=100.0)
    words = f"--output {tmp_path}/placed --packed --place auto --for {run}"
    found = answer(tmp_path, words, said=said)
    # The trainer is so slow that all that makes the table smaller is left to the loader.
    left = {name: ops for name, ops in found["placement"].items() if ops}
    assert left
    table = FeatureTable.open(tmp_path / "placed")
    assert {f.name: [step["op"] for step in f.online] for f in table.fields if f.online} == left
    assert placement_of(table.record.spec) == found["placement"]
    assert "# loader: equally fast, and " in table.record.spec
    assert sum(f.bytes for f in table.files) < sum(
        f.bytes for f in FeatureTable.open(tmp_path / "etl").files
    )
    assert sum(line.startswith(("  I", "  C")) for line in said.text.splitlines()) == 39
    assert_names(said.text, "pair:", "cross", "C1, C2")
    assert found["foretold_rows_per_s"] == 100
    hashes = []
    for name in ("etl", "placed"):
        copies = (
            PackedCopy() if name == "placed" else None
        )  # which hold what operators are left to work on
        with BatchLoader(
            FeatureTable.open(tmp_path / name),
            batch_size=160,
            order=Order(last="pad"),
            reading=Reading(packed=copies),
        ) as loader:
            hashes.append(
                (sum(batch.rows for batch in loader), loader.order_hash, loader.cardinalities)
            )
            counts = loader.store
    assert hashes[0] == hashes[1]
    assert (counts["packed_hits"] > 0, counts["packed_misses"]) == (True, 0)
    assert found["packed_bytes"] > counts["packed_bytes"] > 0
    answer(tmp_path, f"--output {tmp_path}/placed --mode append")
    assert FeatureTable.open(tmp_path / "placed").version == 1


def test_where_the_loader_bounds_the_rate_all_goes_into_the_etl(tmp_path, monkeypatch):
    monkeypatch.setattr(column_costs, "_timed", lambda work, clock: (1e-3, work()))
    synthesize(tmp_path / "log", rows=1000, seed=2)
    answer(tmp_path, f"--output {tmp_path}/etl")
    run = ran(tmp_path / "run", tmp_path / "etl")
    words = f"--output {tmp_path}/etl --mode overwrite --place auto --explain --for {run}"
    found = answer(tmp_path, words)
    assert not any(found["placement"].values())
    assert found["mode"] == "overwrite"
    assert FeatureTable.open(tmp_path / "etl").version == 0  # it was only explained


def test_what_cannot_be_placed_is_refused_by_name(tmp_path):
    synthesize(tmp_path / "log", rows=300, seed=2)
    answer(tmp_path, f"--output {tmp_path}/etl")
    run, empty = (ran(tmp_path / name, tmp_path / "etl") for name in ("run", "empty"))
    (empty / "metrics.jsonl").write_text("")
    gone = ran(tmp_path / "gone", tmp_path / "nowhere")

    def refused(kind: type[UsageError], facts: tuple, words: str, text: str = SPEC) -> None:
        with raises(kind, *facts):
            answer(tmp_path, f"--output {tmp_path}/new {words}", text=text)
        assert not (tmp_path / "new" / "_delta_log").exists()

    auto = f"--place auto --for {run}"
    other, less = (
        SPEC.replace("low = -2", "low = -1"),
        SPEC[: SPEC.index('[[column]]\nname = "pair"')],
    )
    refused(RunError, ("log:", "config.json"), f"--place auto --for {tmp_path}/log")
    refused(CannotPlace, ("empty:", "no stage"), f"--place auto --for {empty}")
    refused(CannotPlace, ("another spec", "'I1'"), auto, other)
    refused(CannotPlace, ("another spec", "'pair'"), auto, less)
    said = with_placement(SPEC, {"C12": ("hash",)})
    refused(CannotPlace, ("spec.toml:", "[placement]"), auto, said)
    facts = ("gone:", "nowhere:", "no feature table")
    refused(CannotPlace, facts, f"--place auto --for {gone}")
    for words in ("--place auto", f"--for {run}"):
        refused(UsageError, ("--place auto", "--for RUN"), words)
    refused(OptionError, ("--place:", "'autp'", "'auto'"), f"--place autp --for {run}")
    with raises(UsageError, "--place auto", "--mode overwrite"):
        answer(tmp_path, f"--output {tmp_path}/etl --mode append {auto}")


def test_a_spec_may_say_it_itself():
    spec = Spec.own(with_placement(SPEC, {"I2": ("clip", "log"), "C12": ("hash",), "C3": ()}))
    assert {c.name: (c.online, c.left_as, c.raw) for c in spec.columns if c.online is not None} == {
        "I2": (1, "double", True),
        "C12": (0, "string", True),
    }
    marked = Spec.own(SPEC.replace("size = 1000}]", "size = 1000, online = true}]", 1))
    same = {c.name: c for c in spec.columns}["C12"]
    assert {c.name: c for c in marked.columns}["C12"] == same
    assert leave_to_loader(same, None, spec.kinds, "").online is None
    wrong = {
        '"C99" = []': ("placement.C99", "'C9'"),
        "I2 = ['clip']": ("placement.I2 = ['clip']", "['fill', 'clip', 'log']"),
        "pair = ['cross']": ("placement.pair:", "cross", "C1, C2"),
        "label = ['hash']": ("placement.label = ['hash']", "[]"),
    }
    for line, facts in wrong.items():
        with raises(SpecError, *facts):
            Spec.own(f"{SPEC}\n[placement]\n{line}\n")


def test_each_column_says_how_it_may_be_stored():
    spec = Spec.own(SPEC)
    columns = {c.name: c for c in spec.columns}
    assert [c.online for c in ways(columns["I1"], spec.kinds)[0]] == [None, 0, 1, 2]
    assert ways(columns["pair"], spec.kinds)[1].startswith("cross takes several columns")


def test_an_append_of_other_columns_is_refused_before_it_starts(tmp_path):
    synthesize(tmp_path / "log", rows=300, seed=2)
    answer(tmp_path, f"--output {tmp_path}/t")
    more = SPEC + column("I2", "dense", "fill, value = 0")
    more += column("more", "dense", "fill, value = 1", "I2")
    said = Said()
    with pytest.raises(
        CommitError,
        match=r"cannot append, .*column 'more' is not in the table.*"
        "--mode overwrite --update-state with all of the input",
    ):
        answer(tmp_path, f"--output {tmp_path}/t --mode append", text=more, said=said)
    assert not said.text
