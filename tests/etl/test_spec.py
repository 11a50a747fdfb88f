"""Specs: what is read, and that every mistake is named by its path and its nearest right name."""

from __future__ import annotations

import pytest

from sluice.etl.ops.ids import Categorify
from sluice.etl.ops.numeric import Fill, Log
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.toml_keys import SpecError

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
    assert [learned.key for learned in spec.fitted] == ["C1/0"]
    assert spec.table.split == {"train": 0.8, "validation": 0.1, "test": 0.1}


def test_only_what_changes_the_fit_changes_its_hash():
    spec = Spec.parse(GOOD)
    assert Spec.parse(GOOD.replace("size = 10", "size = 11")).fitted_hash == spec.fitted_hash
    assert (
        Spec.parse(GOOD.replace("min_count = 2", "min_count = 3")).fitted_hash != spec.fitted_hash
    )


def test_criteo_spec_is_good(repo):
    spec = Spec.read(repo / "features" / "criteo.toml")
    assert [c.name for c in spec.columns] == [
        "label",
        *(f"I{i}" for i in range(1, 14)),
        *(f"C{i}" for i in range(1, 27)),
    ]
    assert {op.name for c in spec.columns for op in c.ops} == {
        "fill",
        "clip",
        "log",
        "categorify",
        "hash",
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 3", "sede = 3", r"table\.sede: unknown key \(did you mean 'seed'\?\)"),
        ("[table]", "[tabel]", r"tabel: unknown key \(did you mean 'table'\?\)"),
        (
            "min_count = 2",
            "min_cuont = 2",
            r"column\[2\]\.ops\[0\]\.min_cuont: unknown key \(did you mean 'min_count'\?\)",
        ),
        (
            'op = "log"',
            'op = "lgo"',
            r"column\[1\]\.ops\[1\]\.op = 'lgo': unknown operator \(did you mean 'log'\?\)",
        ),
        (
            'role = "dense"',
            'role = "dens"',
            r"column\[1\]\.role = 'dens': unknown role \(did you mean 'dense'\?\)",
        ),
        ('match = "C*"', 'match = "D*"', r"column\[2\]\.match = 'D\*': matches no input column"),
        ('match = "C*"', 'match = "*"', r"column\[2\]\.match = '\*': column\[1\] matches 'I1' too"),
        (
            'name = "C2"',
            'name = "label"',
            r"column\[3\]\.name = 'label': column\[0\] has this name already",
        ),
        ('name = "C2"', 'name = "C3"', r"column\[3\]\.name = 'C3': no such input column"),
        (
            'name = "C2"',
            'name = "C9"\nfrom = "C22"',
            r"column\[3\]\.from = 'C22'.*did you mean 'C2'",
        ),
        ('"I1..I3:int"', '"I1..I3:itn"', r"input\.columns\[1\].*did you mean 'int'"),
        (
            '"I1..I3:int"',
            '"I1..I3:int", "I2:int"',
            r"input\.columns\[2\]: column 'I2' is there twice",
        ),
        ('"I1..I3:int"', '"I3..I1:int"', r"input\.columns\[1\]: 'I3..I1' is no range"),
        ('{op = "fill"}, ', "", r"column 'I1' may have nulls"),
        ("size = 10", "size = 0", r"column\[3\]\.ops\[0\]\.size = 0: must be from 1"),
        ("size = 10", "salt = 1", r"column\[3\]\.ops\[0\]: hash needs size"),
        ("size = 10", 'size = "10"', r"column\[3\]\.ops\[0\]\.size = '10': must be int"),
        (
            "width = 8",
            "widht = 8",
            r"column\[2\]\.embedding\.widht: unknown key \(did you mean 'width'\?\)",
        ),
        (
            'ops = [{op = "hash", size = 10}]',
            "",
            r"role 'sparse', which needs id.*categorify or hash",
        ),
        ('role = "label"', 'role = "dense"\nops = [{op = "fill"}]', "exactly one must have role"),
        (
            "seed = 3",
            "split = {train = 0.5, test = 0.4}",
            r"table\.split: the shares add up to 0.9",
        ),
        ("seed = 3", 'split = {"a/b" = 1.0}', r"table\.split\.a/b"),
        ("seed = 3", "row_group_rows = 0", r"table\.row_group_rows = 0"),
        ("seed = 3", "seed = true", r"table\.seed = True: must be int"),
        ("seed = 3", "seed = ", "not TOML"),
        ("seed = 3", 'split_by = "C9"', r"table\.split_by = 'C9': no such input column"),
        (
            "seed = 3",
            'split_by = "C1"\nsplit_column = "C2"',
            r"table\.split_column: cannot be combined with split_by",
        ),
        ("seed = 3", 'order = "C1"', r"table\.order = 'C1': .* text,.* number"),
        ("seed = 3", 'split = {a = 5, b = 3}\nsplit_time = "I1"', r"table\.split: .* must rise"),
        (
            '{op = "log", shift = 3}',
            '{op = "hash", size = 3}',
            r"has role 'dense', which needs number",
        ),
        (
            '{op = "log", shift = 3}',
            '{op = "split"}, {op = "log"}',
            r"ops\[2\]: log takes number, but column 'I1' is texts",
        ),
        (
            '{op = "log", shift = 3}',
            '{op = "overlap"}',
            r"column\[1\]\.ops\[1\]: overlap takes row",
        ),
        (
            '{op = "log", shift = 3}',
            '{op = "bag"}',
            r"ops\[1\]: bag takes numbers or texts or ids, but column 'I1' is number",
        ),
        (
            '{op = "log", shift = 3}',
            '{op = "log", shift = 3, online = true}, {op = "clip", low = 0}',
            r"must be too",
        ),
        (
            '{op = "fill"}, {op = "log", shift = 3}',
            '{op = "target", online = true}, {op = "fill", online = true}',
            r"column\[\d\]: target .* label and key",
        ),
        (
            '{op = "fill"}, {op = "log", shift = 3}',
            '{op = "clip", low = 0, online = true}',
            "may have nulls",
        ),
        (
            '{op = "hash", size = 10}',
            '{op = "python", function = "m:f", inputs = "text", output = "id", size = 3, online = true}',
            r"column\[\d\]: python .*'m:f'",
        ),
        (
            '{op = "hash", size = 10}',
            '{op = "modulus", size = 9, online = true}, {op = "hash", size = 3}',
            "must be too",
        ),
        (
            '{op = "fill"}, {op = "log", shift = 3}',
            '{op = "fill"}, {op = "bucketize", boundaries = [1], online = true}',
            r"has role 'dense', which needs number",
        ),
        (
            '{op = "hash", size = 10}',
            '{op = "categorify", joint = 3}',
            r"ops\[0\]\.joint = 3: must be str",
        ),
        (
            '{op = "hash", size = 10}',
            '{op = "bucketize", boundaries = [2, 1]}',
            r"boundaries = \[2.0, 1.0\]: must be numbers that rise",
        ),
        (
            '{op = "hash", size = 10}',
            '{op = "vocabulary", values = ["a", "a"]}',
            r"ops\[0\]\.values: must be one or more",
        ),
        (
            '{op = "hash", size = 10}',
            '{op = "map", values = ["a"], to = []}',
            r"ops\[0\]\.to: has 0 texts for 1 values",
        ),
        (
            'name = "C2"',
            'name = "X"\nfrom = ["C1", "C2"]',
            r"ops\[0\]: hash takes text, but column 'X' is several",
        ),
        ("[table]", "[sample]\nnegatives = 2\n[table]", r"sample\.negatives = 2: must be a share"),
        (
            "[table]",
            '[[filter]]\ncolumn = "I1"\nop = "=~"\nvalue = 1\n[table]',
            r"filter\[0\]\.op = '=~': unknown comparison",
        ),
        (
            "[table]",
            '[[filter]]\ncolumn = "I1"\nop = "=="\nvalue = "x"\n[table]',
            r"filter\[0\]\.value = 'x': column 'I1'",
        ),
        (
            "[table]",
            '[[history]]\nname = "H"\nof = "C1"\nby = "C2"\norder = "I9"\nlength = 3\n[table]',
            r"history\[0\]\.order = 'I9': no such input column \(did you mean 'I3'|history\[0\]\.order = 'I9'",
        ),
        (
            "[table]",
            '[[join]]\npath = "x"\non = "C1"\ncolumns = ["C2:text"]\n[table]',
            r"join\[0\]\.columns = 'C2'",
        ),
        (
            "[table]",
            "[drift]\npsy = {warn = 1}\n[table]",
            r"drift\.psy: unknown key \(did you mean 'psi'\?\)",
        ),
        ("[table]", '[dedup]\nkeep = "any"\n[table]', r"dedup\.keep = 'any'"),
        (
            "[table]",
            "multiline = true\n[table]",
            r"input\.multiline: .* csv.*'tsv'",
        ),
        (
            "[table]",
            'optional = "I1"\n[table]',
            r"input\.optional = \['I1'\]: in tsv they must be the last of",
        ),
        (
            "[input]",
            '[input]\nformat = "parquet"\noptional = ["I9"]',
            r"input\.optional = 'I9': no such input column",
        ),
        ("seed = 3", 'partition = "C9"', r"table\.partition = 'C9': no such input column"),
        (
            "seed = 3",
            'partition = "C1"\norder = "I1"',
            r"table\.order: cannot be combined with partition",
        ),
        (
            "seed = 3",
            'order = "I1"\ntogether = "C1"',
            r"table\.order: cannot be combined with together",
        ),
        (
            "[table]",
            '[negatives]\ncolumn = "C1"\n[table]\npartition = "C2"',
            r"table\.partition: cannot be combined with",
        ),
        (
            'name = "C2"',
            'name = "partition"\nfrom = "C2"',
            r"name = 'partition': this name is the table's own",
        ),
        (
            '"I1..I3:int"',
            '{name = "I1..I3:text", format = "%Y"}',
            r"input\.columns\[1\] = .*becomes seconds since 1970",
        ),
        (
            '"I1..I3:int"',
            '{name = "I1..I3:int", zone = "UTC"}',
            r"input\.columns\[1\] = .*format = ",
        ),
        (
            '"I1..I3:int"',
            '{name = "I1..I3:int", format = "%Y", zone = "Bonn"}',
            r"columns\[1\]\.zone = 'Bonn': no such",
        ),
        (
            "[table]",
            'encoding = "utf-16"\n[table]',
            r"input\.encoding = 'utf-16': .*line's end",
        ),
        (
            "[table]",
            'encoding = "utf-7"\n[table]',
            r"input\.encoding = 'utf-7': .*line's end",
        ),
        (
            "[table]",
            'encoding = "latin-99"\n[table]',
            r"input\.encoding = 'latin-99': no such encoding; write",
        ),
        (
            "[input]",
            '[input]\nformat = "parquet"\nencoding = "cp1252"',
            r"input\.encoding: .*tsv or csv or json",
        ),
        (
            "[input]",
            '[input]\nformat = "delta"\nplace = "p"',
            r"input\.place: .*'delta'",
        ),
        (
            "[table]",
            'place = "I1"\n[table]',
            r"input\.place = 'I1': must be the name of a new column",
        ),
        (
            '"I1..I3:int", "C1..C2:text"]',
            '"I1..I3:int", "C1..C2:text"]\nplace = "Ip"',
            r"input\.place: 'Ip' is made of it, and a server does not know where a row lies",
        ),
        (
            "[table]",
            'place = "p"\n[dedup]\norder = "p"\n[table]',
            r"dedup\.by: name the columns",
        ),
        (
            "seed = 3",
            'unlabelled = "test"',
            r"table\.unlabelled = 'test': must be the name of one more split",
        ),
        (
            "[table]",
            '[sample]\nnegatives = 0.5\n[table]\nunlabelled = "ask"',
            r"table\.unlabelled: cannot be combined with",
        ),
        (
            "[table]",
            '[[join]]\npath = "x"\non = "C1"\ncolumns = ["A:text"]\ndelimiter = ";"\n[table]',
            r"join\[0\]\.delimiter: .* csv.*'parquet'",
        ),
        (
            "[table]",
            '[[join]]\npath = "x"\nformat = "csv"\non = "C1"\ncolumns = ["A:text"]\nfields = ["C1", "AA"]\n[table]',
            r"join\[0\]\.fields: 'A' is none of them \(did you mean 'AA'\?\)",
        ),
        (
            'name = "C2"\nrole = "sparse"\nops = [{op = "hash", size = 10}]',
            'name = "X"\nfrom = ["I1", "C2"]\nrole = "dense"\nops = [{op = "recent", gap = 9}, {op = "fill"}]',
            r"ops\[0\]: recent takes columns of number and numbers, and I1, C2 are number and text",
        ),
        (
            '"C1..C2:text"]',
            '"C1..C2:text", "T:texts"]',
            r"input\.columns\[3\] = 'T:texts': tsv has no lists",
        ),
    ],
)
def test_a_mistake_is_named_by_its_path(old, new, message):
    assert old in GOOD
    with pytest.raises(SpecError, match=message):
        Spec.parse(GOOD.replace(old, new), "my.toml")


def test_joint_columns_share_a_state_and_must_agree():
    text = GOOD.replace(
        '{op = "categorify", min_count = 2, oov = 4}', '{op = "categorify", joint = "C"}'
    ).replace('{op = "hash", size = 10}', '{op = "categorify", joint = "C"}')
    (learned,) = Spec.parse(text).fitted
    assert (learned.key, [c.name for c, _ in learned.users]) == ("joint/C", ["C1", "C2"])
    with pytest.raises(SpecError, match="joint = 'C' has other parameters in column 'C1'"):
        Spec.parse(text[::-1].replace('"C" = tnioj'[::1], '2 = voo ,"C" = tnioj', 1)[::-1])


def test_levels_are_the_operators_that_learn_one_after_the_other():
    text = GOOD.replace('{op = "log", shift = 3}', '{op = "fill_mean"}, {op = "standardise"}')
    spec = Spec.parse(text)
    assert spec.levels == 2
    assert {learned.key: learned.level for learned in spec.fitted}["I1/2"] == 1
    with pytest.raises(SpecError, match="at most 3 operators that learn"):
        Spec.parse(text.replace('{op = "standardise"}', ", ".join(['{op = "standardise"}'] * 3)))


def test_one_column_becomes_several():
    text = (
        GOOD.replace(
            '{op = "fill"}, {op = "log", shift = 3}', '{op = "fill_median", indicator = true}'
        )
        + """
[[column]]
name = "kind"
from = "C1"
role = "dense"
ops = [{op = "one_hot", values = ["a", "b"]}]
"""
    )
    names = [c.name for c in Spec.parse(text).columns]
    assert names == [
        "label",
        "I1",
        "I1_missing",
        "I2",
        "I2_missing",
        "I3",
        "I3_missing",
        "C1",
        "C2",
        "kind=a",
        "kind=b",
    ]


@pytest.mark.parametrize(
    ("role", "sources", "before", "made"),
    [
        ("dense", '"C1"', '{op = "parse_time"}, ', ("parse_time", "missing")),
        ("dense", '["I1", "C1"]', '{op = "hour"}, ', ("hour", "missing")),
        ("sparse", '"I1"', '{op = "clip", low = 0}, ', ("clip", "missing")),
        ("dense", '"I1"', '{op = "standardise"}, ', ("missing",)),
    ],
)
def test_an_indicator_is_a_dense_column_of_what_the_fill_fills(role, sources, before, made):
    after = ', {op = "bucketize", boundaries = [1]}' if role == "sparse" else ""
    spec = Spec.parse(f'''{GOOD}
[[column]]
name = "x"
from = {sources}
role = "{role}"
ops = [{before}{{op = "fill", indicator = true}}{after}]
''')
    column = {c.name: c for c in spec.columns}["x_missing"]
    assert (column.role, tuple(op.name for op in column.ops)) == ("dense", made)


@pytest.mark.parametrize(
    ("role", "chain", "complaint"),
    [
        (
            "dense",
            '{op = "categorify"}, {op = "count"}, {op = "fill", indicator = true}',
            "indicator: the added column is made of text here, not of a number; leave indicator out",
        ),
        (
            "id_list",
            '{op = "split"}, {op = "parse_time"}, {op = "fill", indicator = true}, {op = "hash", size = 9}',
            "indicator: the added column is made of numbers here",
        ),
        (
            "label",
            '{op = "parse_time"}, {op = "fill", indicator = true}',
            "indicator: a label cannot make another column",
        ),
    ],
)
def test_an_indicator_that_cannot_be_made_is_refused(role, chain, complaint):
    with pytest.raises(SpecError, match=complaint):
        Spec.parse(
            f'{GOOD}\n[[column]]\nname = "x"\nfrom = "C1"\nrole = "{role}"\nops = [{chain}]\n'
        )


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            '"é", "É"',
            "column 'x=É': a Delta table cannot tell it from 'x=é'; give one of them another name",
        ),
        (r'"a\u0000b"', r"column 'x=a\\x00b': a file cannot hold a name with the character 0"),
    ],
)
def test_names_that_no_table_can_hold_are_refused(values, complaint):
    with pytest.raises(SpecError, match=complaint):
        Spec.parse(
            f'{GOOD}\n[[column]]\nname = "x"\nfrom = "C1"\nrole = "dense"\n'
            f'ops = [{{op = "one_hot", values = [{values}]}}]\n'
        )


def test_what_is_left_to_the_loader_stands_in_the_field():
    text = GOOD.replace(
        "shift = 3}", 'shift = 3, online = true}, {op = "standardise", online = true}'
    )
    field = Spec.parse(text).fields({})[1]
    assert field.online == (
        {"op": "log", "shift": 3.0, "floor": 1e-6},
        {"op": "standardise", "state": "I1/2"},
    )


def test_ids_left_to_the_loader_are_stored_as_the_numbers_that_they_are_made_of():
    ids = '{op = "categorify", min_count = 2, oov = 4}'
    for chain, kind, ops in (
        ('{op = "modulus", size = 9, online = true}', "int64", ["modulus"]),
        ('{op = "modulus", size = 9}', "int32", []),
        ('{op = "bucketize", boundaries = [1], online = true}', "double", ["bucketize"]),
    ):
        text = GOOD.replace(ids, chain).replace(
            "C1..C2:text", "C1..C2:" + ("int" if kind == "double" else "text")
        )
        field = next(f for f in Spec.parse(text).fields({"C1": 11}) if f.name == "C1")
        assert (field.type, [step["op"] for step in field.online], field.cardinality) == (
            kind,
            ops,
            11,
        )


def test_a_missing_spec_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"nothing\.toml: the spec cannot be read"):
        Spec.read(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("function", "inputs", "complaint"),
    [
        (
            "no:f",
            "text",
            r"my\.toml: column 'C2': function = 'no:f': cannot be imported \(No module named 'no'\)",
        ),
        ("os.path:nothing", "text", r"'os\.path:nothing': cannot be imported"),
        ("os.path:sep", "text", r"'os\.path:sep': must be module:function"),
        ("os", "text", r"'os': must be module:function"),
        ("os:../x", "text", r"must be module:function"),
        ("os.path:basename", '["text", "text"]', r"'os\.path:basename': cannot take 2 arrays"),
    ],
)
def test_a_users_own_spec_says_at_once_what_is_wrong_with_its_functions(
    function, inputs, complaint
):
    text = GOOD.replace(
        '{op = "hash", size = 10}',
        f'''{{op = "python", function = "{function}", '''
        f'inputs = {inputs if inputs.startswith("[") else repr(inputs)}, output = "id", size = 9}}',
    )
    if not inputs.startswith("["):
        assert Spec.parse(text).functions == {function}  # which imports nothing
    with pytest.raises(SpecError, match=complaint):
        Spec.own(text, "my.toml")
