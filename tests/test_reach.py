"""How much of our own code a program reaches by import: what it may load, early or late, and so may break it.

docs/architecture.md holds the ceilings, with the aims beside them; `python -m tests.test_reach` prints where the lines
of each program are.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, is_for_types_only, modules, tree

PROGRAMS = {"the trainer": "sluice.dlrm.train", "the Loader": "sluice.ingest.loader", "the ETL job": "sluice.etl.job"}
_STEP = 100


@cache
def known() -> dict[str, Path]:
    facade = {"sluice" + ("" if path.stem == "__init__" else f".{path.stem}"): path
              for path in (ROOT / "sluice").glob("*.py")}
    return {**facade, **modules()}


@cache
def uses(module: str) -> set[str]:
    """Our modules that one imports anywhere but for types alone, or names in a text, with the folders they lie in."""
    found = {module}

    def visit(node: ast.AST) -> None:
        if is_for_types_only(node):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update((str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and module != "sluice":
            found.add(node.value.partition(":")[0])  # a module that is imported, or started, by its name
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree(known()[module]))
    found |= {name.rsplit(".", above)[0] for name in found for above in range(1, name.count(".") + 1)}
    return found & known().keys()


def reach(program: str) -> Counter[str]:
    """Every module that a program reaches, and its lines."""
    reached, ahead = Counter[str](), [program]
    while ahead:
        module = ahead.pop()
        if module not in reached:
            reached[module] = len(known()[module].read_text().splitlines())
            ahead += uses(module) - reached.keys()
    return reached


def ceilings() -> dict[str, int]:
    page = (ROOT / "docs" / "architecture.md").read_text()
    return {name: int(ceiling.replace(",", "")) for name, ceiling in
            re.findall(r"^\| (the \w+(?: \w+)?) \(`[\w.]+`\) \| [\d,]+ \| ([\d,]+) \|$", page, re.MULTILINE)}


@pytest.mark.parametrize(("name", "program"), PROGRAMS.items())
def test_a_program_reaches_no_more_than_its_ceiling(name, program):
    lines = reach(program).total()
    assert lines <= ceilings()[name], f"{name} reaches {lines:,} lines: cut, or say in docs/architecture.md why not"
    assert lines > ceilings()[name] - 5 * _STEP, f"{name} reaches only {lines:,} lines: lower its ceiling"


def test_what_is_imported_late_is_counted_and_what_is_for_types_alone_is_not():
    assert "sluice.agent.report.page" in uses("sluice.agent.__main__")
    assert "sluice.ingest.process.child_main" in uses("sluice.ingest.stages.transform_worker"), "by its name in a text"
    assert "sluice.etl.table.table" in uses("sluice.ingest.read.parquet_files"), "within a function"
    assert "sluice.etl.table.table" not in uses("sluice.ingest.loader"), "for types"
    assert uses("sluice") == {"sluice"}, "the facade's names are looked up when they are first used"


if __name__ == "__main__":
    for name, program in PROGRAMS.items():
        reached = reach(program)
        folders: Counter[str] = Counter()
        for module, lines in reached.items():
            folders[str(known()[module].parent.relative_to(ROOT))] += lines
        print(f"{name}: {reached.total():,} lines\n" + "\n".join(f"  {n:6,}  {f}" for f, n in sorted(folders.items())))
