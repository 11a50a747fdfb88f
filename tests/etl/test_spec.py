"""Specs: what is read, and that every mistake is named by its path and its nearest right name."""

from __future__ import annotations

import pytest

from etl.ops.dense import Fill, Log
from etl.ops.sparse import Categorify
from etl.spec import Spec, SpecError

GOOD = """
[input]
columns = ["label:int", "I1..I3:int", "C1..C2:text"]
[table]
seed = 3
[[column]]
name = "label"
role = "label"
[[column]]
match = "I*"
role = "dense"
ops = [{op = "fill"}, {op = "log", shift = 3}]
[[column]]
match = "C*"
role = "sparse"
ops = [{op = "categorify", min_count = 2, oov = 4}]
embedding = {width = 8}
[[column]]
name = "C2"
role = "sparse"
ops = [{op = "hash", size = 10}]
"""


def test_a_spec_is_read_whole():
    spec = Spec.parse(GOOD)
    assert [c.name for c in spec.columns] == ["label", "I1", "I2", "I3", "C1", "C2"]
    assert spec.columns[1].ops == (Fill(), Log(shift=3.0))
    assert spec.columns[4].ops == (Categorify(min_count=2, oov=4),)
    assert spec.columns[4].width == 8
    assert spec.columns[5].ops[0].name == "hash"  # the exact name wins over the wildcard
    assert [key for _, key, _, _ in spec.fitted] == ["C1/0"]
    assert spec.table.split == {"train": 0.8, "validation": 0.1, "test": 0.1}


def test_only_what_changes_the_fit_changes_its_hash():
    spec = Spec.parse(GOOD)
    assert Spec.parse(GOOD.replace("size = 10", "size = 11")).fitted_hash == spec.fitted_hash
    assert Spec.parse(GOOD.replace("min_count = 2", "min_count = 3")).fitted_hash != spec.fitted_hash


def test_criteo_spec_is_good(repo):
    spec = Spec.read(repo / "features" / "criteo.toml")
    assert [c.name for c in spec.columns] == ["label", *(f"I{i}" for i in range(1, 14)),
                                              *(f"C{i}" for i in range(1, 27))]
    assert {op.name for c in spec.columns for op in c.ops} == {"fill", "clip", "log", "categorify", "hash"}


@pytest.mark.parametrize(("old", "new", "message"), [
    ("seed = 3", "sede = 3", r"table\.sede: unknown key \(did you mean 'seed'\?\)"),
    ("[table]", "[tabel]", r"tabel: unknown key \(did you mean 'table'\?\)"),
    ("min_count = 2", "min_cuont = 2", r"column\[2\]\.ops\[0\]\.min_cuont: unknown key \(did you mean 'min_count'\?\)"),
    ('op = "log"', 'op = "lgo"', r"column\[1\]\.ops\[1\]\.op = 'lgo': unknown operator \(did you mean 'log'\?\)"),
    ('role = "dense"', 'role = "dens"', r"column\[1\]\.role = 'dens': unknown role \(did you mean 'dense'\?\)"),
    ('match = "C*"', 'match = "D*"', r"column\[2\]\.match = 'D\*': matches no input column"),
    ('match = "C*"', 'match = "*"', r"column\[2\]\.match = '\*': column\[1\] matches 'I1' too"),
    ('name = "C2"', 'name = "label"', r"column\[3\]\.name = 'label': column\[0\] has this name already"),
    ('name = "C2"', 'name = "C3"', r"column\[3\]\.name = 'C3': no such input column"),
    ('name = "C2"', 'name = "C9"\nfrom = "C22"', r"column\[3\]\.from = 'C22'.*did you mean 'C2'"),
    ('"I1..I3:int"', '"I1..I3:itn"', r"input\.columns\[1\].*did you mean 'int'"),
    ('"I1..I3:int"', '"I1..I3:int", "I2:int"', r"input\.columns\[2\]: column 'I2' is there twice"),
    ('"I1..I3:int"', '"I3..I1:int"', r"input\.columns\[1\]: 'I3..I1' is no range"),
    ("{op = \"fill\"}, ", "", r"column 'I1' may have nulls"),
    ("size = 10", "size = 0", r"column\[3\]\.ops\[0\]\.size = 0: must be from 1"),
    ("size = 10", "salt = 1", r"column\[3\]\.ops\[0\]: hash needs size"),
    ("size = 10", 'size = "10"', r"column\[3\]\.ops\[0\]\.size = '10': must be int"),
    ("width = 8", "widht = 8", r"column\[2\]\.embedding\.widht: unknown key \(did you mean 'width'\?\)"),
    ('ops = [{op = "hash", size = 10}]', "", r"role 'sparse', which needs id.*categorify or hash"),
    ('role = "label"', 'role = "dense"\nops = [{op = "fill"}]', "exactly one must have role"),
    ("seed = 3", "split = {train = 0.5, test = 0.4}", r"table\.split: the shares add up to 0.9"),
    ("seed = 3", 'split = {"a/b" = 1.0}', r"table\.split\.a/b"),
    ("seed = 3", "row_group_rows = 0", r"table\.row_group_rows = 0"),
    ("seed = 3", "seed = true", r"table\.seed = True: must be int"),
    ("seed = 3", "seed = ", "not TOML"),
])
def test_a_mistake_is_named_by_its_path(old, new, message):
    assert old in GOOD
    with pytest.raises(SpecError, match=message):
        Spec.parse(GOOD.replace(old, new), "my.toml")


def test_a_missing_spec_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"nothing\.toml: the spec cannot be read"):
        Spec.read(tmp_path / "nothing.toml")
