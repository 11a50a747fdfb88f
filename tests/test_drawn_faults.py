"""Drawn faults (`python -m tests.bed draw`): operators, the order of the draws, and a small project that is judged."""

import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.bed.draw import choose_tests, draw
from tests.bed.lines import MARKS, mark_statements
from tests.bed.operators import OPERATORS, Mutation, list_mutations
from tests.bed.reach import ReachedTest, nearest_tests
from tests.bed.share import count, print_share, read_results

pytestmark = pytest.mark.slow

# ---- the operators


def made(source: str, operator: str) -> set[str]:
    """The sources that an operator makes of one, each of which Python can read."""
    texts = {m.apply(source) for m in list_mutations("a.py", source) if m.operator == operator}
    for text in texts:
        ast.parse(text)
    return texts


@pytest.mark.parametrize(
    ("operator", "source", "want"),
    [
        ("flip comparison", "x = a < b", {"x = a >= b"}),
        ("flip comparison", "x = a not in b", {"x = a in b"}),
        ("flip comparison", "x = a < b == c", {"x = a >= b == c", "x = a < b != c"}),
        ("loosen comparison", "x = a <= b", {"x = a < b"}),
        ("loosen comparison", "x = a == b", set()),
        ("shift constant", "x = f(7)", {"x = f(8)", "x = f(6)"}),
        ("shift constant", "x = -1", {"x = -2", "x = -0"}),
        ("shift constant", "x = a[:3] + [True, 0.5]", set()),
        ("swap extremes", "x = min(a, b)", {"x = max(a, b)"}),
        ("swap extremes", "x = np.maximum(a, b)", {"x = np.minimum(a, b)"}),
        ("swap and or", "x = a and b", {"x = (a or b)"}),
        ("drop call", "f(x)", {"pass"}),
        ("drop call", "x = sorted(y)", {"x = y"}),
        ("drop call", "x = y.strip()", {"x = y"}),
        ("swap arguments", "x = f(a, b, b)", {"x = f(b, a, b)"}),
        ("swap arguments", "x = min(a, b)", set()),
        ("shift slice", "x = a[1:n]", {"x = a[2:n]", "x = a[1:n + 1]", "x = a[1:n - 1]"}),
        ("shift slice", "x = a[:3]", {"x = a[1:3]", "x = a[:4]", "x = a[:2]"}),
        ("negate condition", "if a:\n    f()", {"if (not a):\n    f()"}),
        ("negate condition", "x = [a for a in b if not a]", {"x = [a for a in b if a]"}),
        ("drop assignment", "x += 1", {"pass"}),
        ("drop assignment", "def f(a):\n    a = 1", {"def f(a):\n    pass"}),
        ("drop assignment", "def f(a):\n    b = 1", set()),  # the name would be unknown
        ("drop assignment", "def f(a):\n    a.b = 1", {"def f(a):\n    pass"}),
        ("take other branch", "x = a if b else c", {"x = c", "x = a"}),
        ("take other branch", "def f():\n    if a:\n        return 1\n    return 2",
         {"def f():\n    pass\n    return 2"}),
        ("swap arithmetic", "x = a - b", {"x = (a + b)"}),
        ("swap arithmetic", "x = a // b", {"x = (a % b)"}),
        ("swap arithmetic", "x = 'é' % a", set()),
        ("drop keyword", "x = f(a, key=b, timeout=3)", {"x = f(a, timeout=3)"}),
        ("flip boolean", "x = f(True)", {"x = f(False)"}),
    ],
)  # fmt: skip
def test_an_operator_makes_these_faults(operator, source, want):
    assert made(source, operator) == want


def test_every_operator_has_a_case():
    (marks,) = [
        mark
        for mark in test_an_operator_makes_these_faults.pytestmark
        if mark.name == "parametrize"
    ]
    assert {operator for operator, _, want in marks.args[1] if want} == OPERATORS.keys()


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 3 < 4 words."""',
        "def f(a: tuple[int, 3], b: 'x' = None) -> tuple[bool, 1]:\n    'no 1'",
        "@cache(1)\ndef f(): ...",
        "raise ValueError(f'{a + 1} is not {min(a, 2)}', 3)",
        "print('x', 1 < 2, sorted(a), end=b)",
        "warnings.warn(f(a, b), stacklevel=2)",
        "assert 1 < f(a, b)",
        "__all__ = sorted([f(1), 'a'])",
        "_TIMEOUT_S = 30 - 1",
        "_CHUNK_BYTES = 1 << 20",
        "x = f(a, buffer_bytes=1 << 20)",
        "if TYPE_CHECKING:\n    from a import b",
        "class A:\n    def __repr__(self):\n        return f(1, 2)",
        "time.sleep(1)",
    ],
)
def test_what_changes_no_behaviour_gets_no_fault(source):
    assert list_mutations("a.py", source) == []


def test_places_count_bytes():
    source = "x = 'déjà vu', '日本'; y = a < b\n"
    assert made(source, "flip comparison") == {source.replace("<", ">=")}


# ---- the order of the draws


def faults(room: str, operators: dict[str, int]) -> list[Mutation]:
    return [
        Mutation(f"{room}/a.py", n, operator, n, "a", "b")
        for operator, times in operators.items()
        for n in range(times)
    ]


def test_draws_depend_on_the_seed_alone_and_take_each_fault_once():
    rooms = {"etl": faults("etl", {"x": 900, "y": 30}), "dlrm": faults("dlrm", {"x": 9, "z": 300})}
    first = list(draw(rooms, 7))
    assert first == list(draw(rooms, 7)) != list(draw(rooms, 8))
    assert Counter(first) == Counter(
        (room, fault) for room, some in rooms.items() for fault in some
    )
    begun = Counter((room, fault.operator) for room, fault in first[:40])
    assert begun["etl", "y"] >= 5, "operators are drawn before places"
    assert begun["dlrm", "z"] >= 2, "rooms are drawn by their size"


def test_tests_are_taken_while_their_seconds_last():
    some = [ReachedTest(f"tests/a.py::{n}", seconds) for n, seconds in enumerate((1, 2, 30, 1))]
    assert choose_tests(some, 10) == some[:2]
    assert choose_tests(some, 0.5) == some[:1]


def test_files_that_import_a_module_by_other_files_may_test_it():
    names = nearest_tests("etl/spark/history_state.py")
    assert "tests/etl/test_late_rows.py" in names
    assert len({*names}) == len(names)


def test_statements_mark_their_lines_but_compiled_functions_do_not():
    source = '''"""Docstring."""
from __future__ import annotations
def f(x):
    """Docstring."""
    if x:
        y = 1
    elif x is None:
        y = 2
    else:
        y = 3
    return y
@njit
def g(x):
    return x
'''
    tree = mark_statements(ast.parse(source), 100)
    marks = {line for line, text in enumerate(source.splitlines(), 101) if text}
    seen = bytearray(200)
    space = {MARKS: seen, "njit": lambda f: f}
    exec(compile(tree, "a.py", "exec"), space)
    assert space["f"](None) == 2
    assert space["g"](1) == 1
    executed = {place for place, mark in enumerate(seen) if mark}
    assert executed == {103, 105, 107, 108, 111, 113} & marks


# ---- the count


def result(name, status, *, room="etl", operator="x", **more):
    return {"fault": name, "room": room, "operator": operator, "status": status, **more}


def test_the_share_counts_what_the_first_run_found_of_what_is_not_equivalent(tmp_path, capsys):
    lines = [
        {"seed": 7},
        *(result(f"f{n}", "found") for n in range(6)),
        result("i", "fails at import"),
        *(
            result(f"s{n}", "survived", room="dlrm", tests=3, left=0, old="a", new="b")
            for n in range(4)
        ),
        result("s0", "found", room="dlrm", again=True),
    ]
    out = tmp_path / "r.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')
    (tmp_path / "r.equivalents.toml").write_text(
        '[[equivalent]]\nfault = "s1"\nbecause = "of this"\n'
    )
    print_share([out], survivors=True)
    said = capsys.readouterr().out
    assert "| etl | 6 | 0 | 6 | 0 | 0 | 100 % |" in said
    assert "| dlrm | 4 | 1 | 0 | 1 | 2 | 0 % |" in said
    assert "| all | 10 | 1 | 6 | 1 | 2 | 67 % |" in said
    assert "1 more failed at import" in said
    assert "7: s2 (3 tests run" in said
    assert "7: s1" not in said
    assert len(read_results(out)) == len(lines), "a line that was cut is no result"
    with pytest.raises(SystemExit, match="did not survive"):
        count(lines[1:], {"f1": "it was found"})
    with (tmp_path / "r.equivalents.toml").open("a") as file:
        file.write('[[equivalent]]\nfault = "s2"\nbecause = "of that"\n')
    with pytest.raises(SystemExit, match="more than a tenth"):
        print_share([out])


# ---- a small project

RULE = """
KIND = dict(a=True)["a"]


def count(n, step):
    while n:
        n = step(n)
    return n


def unseen(n):
    return n or None
"""
TESTS = """
import subprocess
import sys

from sluice.etl.rule import KIND, count


def test_counts():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, start_new_session=True)
    assert count(3, lambda n: n - 1) == 0
    assert KIND
    child.communicate(b"x")  # which a test that fails never does
"""


@pytest.fixture
def project(tmp_path, repo):
    """A project of one file with its tests, and with the bed."""
    root = tmp_path / "project"
    shutil.copytree(
        repo / "tests/bed",
        root / "tests/bed",
        ignore=shutil.ignore_patterns("*.toml", "__pycache__"),
    )
    shutil.copy(repo / "tests/bed/drawn.toml", root / "tests/bed")
    shutil.copy(repo / "tests/product.py", root / "tests")
    for room in ("etl", "ingest", "agent", "dlrm", "common"):
        (root / f"tests/bed/{room}.toml").write_text("[tests]\n")
    (root / "sluice/etl").mkdir(parents=True)
    for folder in ("tests", "sluice", "sluice/etl"):
        (root / folder / "__init__.py").write_text("")
    shutil.move(root / "sluice/etl", root / "etl")
    (root / "sluice/etl").symlink_to("../etl")
    (root / "etl/rule.py").write_text(RULE)
    (root / "tests/test_rule.py").write_text(TESTS)
    server = root / "tests/bed/failures.py"
    server.write_text(re.sub("^_LARGE = .*$", "_LARGE = ()", server.read_text(), flags=re.M))
    (root / ".gitignore").write_text("__pycache__\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def judge(project, out, faults):
    words = [
        "--seed",
        "1",
        "--rooms",
        "etl",
        "--faults",
        str(faults),
        "--hang",
        "12",
        "--out",
        str(out),
    ]
    subprocess.run(
        [sys.executable, "-m", "tests.bed", "draw", *words],
        cwd=project,
        check=True,
        stdout=subprocess.PIPE,
    )
    head, *lines = read_results(out)
    assert head["seed"] == 1
    return lines


def test_a_small_project_is_judged_in_two_calls_and_nothing_is_left(project, tmp_path):
    out = tmp_path / "out.jsonl"
    some = judge(project, out, 2)
    lines = judge(project, out, 100)
    assert lines[: len(some)] == some
    assert len([line for line in some if line["status"] != "fails at import"]) == 2
    assert [line["fault"] for line in lines] == [
        fault.name for _, fault in draw({"etl": list_mutations("etl/rule.py", RULE)}, 1)
    ], "each fault once, in the order of the draw"
    assert {line["operator"]: line["status"] for line in lines} == {
        "drop keyword": "fails at import",  # dict()["a"]
        "flip boolean": "found",
        "negate condition": "found",
        "drop assignment": "found",  # a loop without end is ended
        "swap and or": "survived",  # no test executes it
    }
    assert (project / "etl/rule.py").read_text() == RULE
    here = (
        tempfile.gettempdir()
    )  # where the copies were, with the Python that each of their processes runs
    left = [process for process in psutil.process_iter(["cmdline"]) if here in str(process.info)]
    assert left == []
    assert list(Path(here).glob("bed-*")) == []


def test_another_seed_does_not_go_on_with_a_file(project, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps({"seed": 2, "rooms": ["etl"], "sources": "x"}) + "\n")
    command = [
        sys.executable,
        "-m",
        "tests.bed",
        "draw",
        "--seed",
        "1",
        "--rooms",
        "etl",
        "--out",
        str(out),
    ]
    ended = subprocess.run(command, cwd=project, check=False, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert "give another file to --out" in ended.stderr
