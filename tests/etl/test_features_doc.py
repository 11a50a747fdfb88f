"""docs/features.md names every key of a spec, and nothing else."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pyarrow as pa
import pytest

from sluice.etl.local.input import only_spark
from sluice.etl.ops import OPERATORS
from sluice.etl.ops.ids import Hash
from sluice.etl.spec.columns import ROLE_KINDS
from sluice.etl.spec.permission import NOTHING
from sluice.etl.spec.row_rules import FILTERS, SECTIONS
from sluice.etl.spec.spec import DRIFTS, FORMATS, INPUT_TYPES, Input, Spec, TableSpec
from sluice.etl.spec.table_transform import transformed
from sluice.etl.table.table import FeatureTable
from sluice.ingest.column_transforms import ColumnTransforms, bound
from tests.etl.jobs import Said, rows_of, run


def test_every_key_is_documented_and_every_example_reads(repo):
    page = (repo / "docs" / "features.md").read_text()
    prose = re.sub("```.*?```", "", page, flags=re.DOTALL)
    words = set(re.findall(r"[A-Za-z_!<>=]+", " ".join(re.findall(r"`([^`]+)`", prose))))
    table = {f.name for kind in (Input, TableSpec) for f in dataclasses.fields(kind)} - {"split_from", "times"}
    wanted = {*OPERATORS, *ROLE_KINDS, *FORMATS, *INPUT_TYPES, *DRIFTS, *table, *SECTIONS, "warn", "refuse",
              *(word for f in FILTERS for word in f.split()),
              *(f.name for op in OPERATORS.values() for f in dataclasses.fields(op))}
    assert wanted - words == set()
    rows = page[page.index("## Operators"):page.index("## `[[transform]]`")].splitlines()
    named = {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(OPERATORS)
    for spec in (repo / "features").glob("*.toml"):
        assert Spec.read(spec).columns


def test_the_transforms_of_the_page_are_what_a_spec_takes(repo, tmp_path, monkeypatch):
    page = (repo / "docs" / "features.md").read_text()
    part = page[page.index("## `[[transform]]`"):page.index("## States")]
    text = "\n".join(re.findall(r"```toml\n(.*?)```", part, re.DOTALL))
    spec = Spec.parse('[input]\nformat = "json"\ncolumns = ["label:int", "I1:int", "I2:int", "C1:text", "C2:text", '
                      '"tags:texts"]\n[[column]]\nname = "label"\nrole = "label"\n'
                      '[[column]]\nmatch = "I*"\nrole = "dense"\nops = [{op = "fill"}]\n'
                      '[[column]]\nmatch = "C*"\nrole = "sparse"\nops = [{op = "hash", size = 8}]\n'
                      '[[column]]\nname = "tags"\nrole = "id_list"\nops = [{op = "hash", size = 8}]\n' + text)
    assert {key for line in part.splitlines() if line.startswith("| `")
            for key in re.findall(r"`(\w+)`", line.split("|")[1])} == {"name", "function", "op", "ops", "inputs",
                                                                       "outputs"}
    sizes = {c.name: 10 for c in spec.columns if c.role in ("sparse", "id_list")}
    stored = spec.fields(sizes, {"tags": (0, 2.0, 4)})
    monkeypatch.chdir(tmp_path)
    np.save("vectors.npy", np.arange(20, dtype=np.float32).reshape(10, 2))
    built_in = tuple(one for one in spec.transforms if one.ops)
    assert len(built_in) == 6
    columns = {"I1": np.array([1, 2], np.float32), "I2": np.array([0, 3], np.float32),
               "C1": np.array([2, 3], np.int32), "C2": np.array([9, 4], np.int32),
               "tags": np.array([2, 3, 2], np.int32), "tags.lengths": np.array([1, 2], np.int32)}
    found = ColumnTransforms(bound(built_in, stored, NOTHING), transformed(stored, built_in))(columns, 2)
    assert [found[name].tolist() for name in ("v0", "v1")] == [[18.0, 8.0], [19.0, 9.0]]
    assert (found["tag_pairs.lengths"].tolist(), found["newest_tags.lengths"].tolist()) == ([0, 1], [1, 2])
    assert found["I2"][0] == 0.0
    assert {one.name: [o.name for o in one.outputs] for one in spec.transforms}["ratio"] == ["I1", "ratio", "group"]


def _log_as_it_comes(repo, folder):
    """The page's examples of a log: its file, and the specs on it, on other rows and on the order of rows."""
    page = (repo / "docs" / "features.md").read_text()
    part = page[page.index("## A log as it comes"):page.index("## Values that turn to null")]
    (raw,) = re.findall(r"```csv\n(.*?)```", part, re.DOTALL)
    (folder / "log.csv").write_bytes(raw.encode("cp1252"))
    (folder / "users.csv").write_bytes("ann|Köln|31\nben|Bern|\n".encode("latin-1"))
    rows = [f"{number % 2}\t{name}{number}\n" for name in "ba" for number in range(50)]
    for name, lines in (("b", rows[:50]), ("a", rows[50:])):
        (folder / f"{name}.tsv").write_text("".join(lines))
    own, others, by_order = re.findall(r"```toml\n(.*?)```", part, re.DOTALL)
    return own, others.replace("users.csv", str(folder / "users.csv")), by_order


def _made(session, folder, text, *files, said=None):
    out = folder / f"t{len(list(folder.iterdir()))}"
    run(session, out, *(folder / name for name in files), text=text, said=said, max_rejects=0.2)
    table = FeatureTable.open(out)
    return table, {split: rows_of(table, split) for split in table.splits}


def _check_log(session, repo, folder):
    own, _, by_order = _log_as_it_comes(repo, folder)
    said = Said()
    table, splits = _made(session, folder, own, "log.csv", said=said)
    assert "nothing is made of the input columns user, note" in said.text
    assert {split: sorted((row["label"], row["hour"]) for row in rows) for split, rows in splits.items()} == {
        "train": [(0, 18.0), (1, 18.0), (1, 18.0)], "test": [(0, 9.0)], "ask": [(0, 9.0)]}
    assert sorted(table.state()["words/4"]["value"].to_pylist()) == ["again", "café", "der", "müller", "noir"]
    genres = {tuple(np.frombuffer(row["genres"], np.uint32)) for rows in splits.values() for row in rows}
    assert genres == {(3, 5), (4,), (5,), (3, 4)}
    _, splits = _made(session, folder, by_order, "a.tsv", "b.tsv")
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 80, "validation": 10, "test": 10}
    items = [f"a{number}" for number in range(50)] + [f"b{number}" for number in range(50)]
    ids = Hash(size=1000).apply(pa.array(items), None).to_pylist()
    assert [row["item"] for rows in (splits["train"], splits["validation"], splits["test"]) for row in rows] == ids


def test_the_log_of_the_page_is_read_as_it_comes(repo, tmp_path):
    _check_log(None, repo, tmp_path)
    own, others, _ = _log_as_it_comes(repo, tmp_path)
    assert only_spark(Spec.parse(own + others)) is not None


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_spark_makes_the_same_of_it_and_adds_what_needs_other_rows(spark, repo, tmp_path):
    spark.conf.set("spark.sql.files.maxPartitionBytes", "100")  # a part of a file is not its beginning
    try:
        _check_log(spark, repo, tmp_path)
    finally:
        spark.conf.unset("spark.sql.files.maxPartitionBytes")
    own, others, _ = _log_as_it_comes(repo, tmp_path)
    _, splits = _made(spark, tmp_path, own + others, "log.csv")
    names = ("town", "age", "since", "last_hour", "in_session", "session_seconds")
    assert {split: sorted(tuple(row[name] for name in names) for row in rows) for split, rows in splits.items()} == {
        "train": [("Bern", 0.0, -1.0, 0.0, 0.0, 0.0), ("Köln", 31.0, -1.0, 0.0, 0.0, 0.0),
                  ("Köln", 31.0, 1200.0, 1.0, 1.0, 1200.0)],
        "test": [("Köln", 31.0, 51000.0, 0.0, 0.0, 0.0)], "ask": [("Bern", 0.0, 53700.0, 0.0, 0.0, 0.0)]}
