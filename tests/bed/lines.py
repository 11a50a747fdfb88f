"""Notes which lines of the product each test executes, in all processes of the test.

`install` runs at the start of each Python process of a copy (`copies.py`). It has imported modules of the product mark
a byte for each statement that begins. All processes share these bytes: a file that each of them maps. So the lines of
killed processes count too. Functions that numba compiles mark nothing.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import json
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MARKS = "__bed_marks__"
"""The builtin that the statements write to."""
Places = dict[str, int]
"""File → the place of its line 0 among the bytes of all lines."""


def place_lines(root: Path, files: Sequence[str]) -> Places:
    """Returns where the lines of each file begin. The key "" holds the number of all bytes."""
    places, total = Places(), 0
    for file in files:
        places[file] = total
        total += (root / file).read_bytes().count(b"\n") + 2
    return {**places, "": total}


def prepare(folder: Path, root: Path, files: Sequence[str]) -> None:
    """Writes into `folder` what `install` reads."""
    places = place_lines(root, files)
    (folder / "marks").write_bytes(bytes(places[""]))
    (folder / "lines.json").write_text(json.dumps({"root": str(root.resolve()), "places": places}))


def install(folder: str) -> None:
    """Makes this process mark the lines that it executes."""
    content = json.loads((Path(folder) / "lines.json").read_text())
    root, places = content["root"], content["places"]
    with (Path(folder) / "marks").open("r+b") as file:
        setattr(builtins, MARKS, mmap.mmap(file.fileno(), 0))
    sys.pycache_prefix = str(Path(folder) / "compiled")
    loader: Any = importlib.machinery.SourceFileLoader
    usual = loader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **more: Any) -> Any:
        name = str(Path(path).resolve()).removeprefix(root + "/")
        if name in places and isinstance(data, bytes):
            data = mark_statements(ast.parse(data, path), places[name])
        return usual(self, data, path, **more)

    loader.source_to_code = source_to_code


def mark_statements(tree: ast.Module, place: int) -> ast.Module:
    """Has each statement mark its line before it begins."""
    without_marks = find_compiled(tree)
    _mark_body(tree, place, without_marks)
    return ast.fix_missing_locations(tree)


def _mark_body(node: ast.AST, place: int, without_marks: set[ast.AST]) -> None:
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        body: list[Any] = []
        for child in children:
            if isinstance(child, ast.AST) and child not in without_marks:
                _mark_body(child, place, without_marks)
            if isinstance(child, ast.stmt) and not _comes_first(child):
                mark = ast.parse(f"{MARKS}[{place + child.lineno}] = 1").body[0]
                for part in ast.walk(mark):
                    ast.copy_location(part, child)
                body.append(mark)
            body.append(child)
        if isinstance(value, list):
            setattr(node, field, body)


def _comes_first(statement: ast.stmt) -> bool:
    """Whether nothing may stand before a statement: a docstring, or an import of the future."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def find_compiled(tree: ast.Module) -> set[ast.AST]:
    """Returns the functions that numba compiles."""
    return {
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("njit" in ast.unparse(part) for part in node.decorator_list)
    }
