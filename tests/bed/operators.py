"""Operators of mutation: each makes small faults from the syntax tree of a source file (`list_mutations`).

An operator gets a node and yields what may stand in its place. What cannot change behaviour gets no fault: texts of
errors and logs, annotations, decorators, assertions, and constants that only set a time or a size.
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault that was drawn."""

    file: str
    line: int
    """The first line of the statement: tests that execute it may find the fault."""
    operator: str
    start: int
    """Where the replaced bytes begin in the file."""
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}@{self.start} {self.operator}: {self.new[:60]}"

    def apply(self, source: str) -> str:
        data, end = source.encode(), self.start + len(self.old.encode())
        return (data[: self.start] + self.new.encode() + data[end:]).decode()


Around = tuple[ast.AST, ...]
"""The nodes that hold a node, the nearest first."""
Operator = Callable[[Any, Around], Iterator[ast.AST]]

# ---- the operators


def _pairs(text: str, of: Any = ast) -> dict[Any, Any]:
    """Returns both directions of pairs of names of `ast`'s classes."""
    pairs = [[getattr(of, name) for name in pair.split()] for pair in text.split(",")]
    return dict(pairs) | {there: here for here, there in pairs}


_OPPOSITE = _pairs("Lt GtE,LtE Gt,Eq NotEq,In NotIn,Is IsNot")
_LOOSENED = _pairs("Lt LtE,Gt GtE")
_ARITHMETIC = _pairs("LShift RShift,BitAnd BitOr,Mod FloorDiv") | {ast.Sub: ast.Add}
_EXTREMES = {"min": "max", "minimum": "maximum", "max": "min", "maximum": "minimum"}
_UNWRAPPED = re.compile("sorted|reversed|abs|round")
_UNWRAPPED_METHODS = re.compile("[lr]?strip|lower|upper|casefold|copy|sort")


def _with(node: ast.AST, **fields: Any) -> Any:
    """Returns a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _compare(node: ast.AST, others: dict[Any, Any]) -> Iterator[ast.AST]:
    for place, op in enumerate(node.ops if isinstance(node, ast.Compare) else ()):
        if type(op) in others:
            yield _with(node, ops=[*node.ops[:place], others[type(op)](), *node.ops[place + 1 :]])


def flip_comparison(node: Any, _: Around) -> Iterator[ast.AST]:
    """`a < b` → `a >= b`, `==` → `!=`, `in` → `not in`, `is` → `is not`."""
    return _compare(node, _OPPOSITE)


def loosen_comparison(node: Any, _: Around) -> Iterator[ast.AST]:
    """`a < b` → `a <= b`, and the reverse."""
    return _compare(node, _LOOSENED)


def shift_constant(node: Any, around: Around) -> Iterator[ast.AST]:
    """`n` → `n + 1`, `n - 1`, for whole numbers. Bounds of slices have an operator of their own."""
    if _is_number(node) and isinstance(node.value, int):
        negative = isinstance(around[0], ast.UnaryOp)
        if not isinstance(around[negative], ast.Slice) and not _sets_time_or_size(node, around):
            yield from (ast.Constant(node.value + step) for step in (1, -1))


def swap_extremes(node: Any, _: Around) -> Iterator[ast.AST]:
    """`min` → `max`, `np.minimum` → `np.maximum`, and the reverse."""
    field = "attr" if isinstance(node, ast.Attribute) else "id"
    if (name := getattr(node, field, "")) in _EXTREMES:
        yield _with(node, **{field: _EXTREMES[name]})


def swap_and_or(node: Any, _: Around) -> Iterator[ast.AST]:
    """`a and b` → `a or b`, and the reverse."""
    if isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def drop_call(node: Any, around: Around) -> Iterator[ast.AST]:
    """`f(x)` as a statement → `pass`; `sorted(x)` → `x`; `x.strip()` → `x`."""
    match node:
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Call() if isinstance(around[0], ast.Expr):
            return
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if _UNWRAPPED.fullmatch(name):
            yield first
        case ast.Call(func=ast.Attribute(attr=name), args=[]) if _UNWRAPPED_METHODS.fullmatch(name):
            yield node.func.value


def swap_arguments(node: Any, _: Around) -> Iterator[ast.AST]:
    """`f(a, b)` → `f(b, a)`, for neighbours that differ."""
    if isinstance(node, ast.Call) and not _COMMUTES.fullmatch(_name_of(node.func)):
        for place, pair in enumerate(itertools.pairwise(node.args)):
            texts = [ast.unparse(part) for part in pair]
            if texts[0] != texts[1] and not any(text.startswith("*") for text in texts):
                yield _with(node, args=[*node.args[:place], *pair[::-1], *node.args[place + 2 :]])


def shift_slice(node: Any, _: Around) -> Iterator[ast.AST]:
    """`x[a:b]` → `x[a + 1:b]`, `x[a:b + 1]`, `x[a:b - 1]`."""
    if isinstance(node, ast.Slice) and (node.lower or node.upper):
        yield _with(node, lower=_plus(node.lower, 1))
        yield _with(node, upper=_plus(node.upper, -1))
        if node.upper:  # else nothing lies beyond the end
            yield _with(node, upper=_plus(node.upper, 1))


def negate_condition(node: Any, around: Around) -> Iterator[ast.AST]:
    """`if a:` → `if not a:`, also of `while`, of expressions and of comprehensions."""
    parent: Any = around[0]
    if getattr(parent, "test", None) is not node and node not in getattr(parent, "ifs", ()):
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif not isinstance(node, ast.Compare):  # which is flipped
        yield ast.UnaryOp(ast.Not(), node)


def drop_assignment(node: Any, around: Around) -> Iterator[ast.AST]:
    """`x += y`, `x.a = y`, `x[i] = y` → `pass`; `x = y` too where x has a value already."""
    function: Any = next((part for part in around if isinstance(part, ast.FunctionDef)), None)
    if isinstance(node, ast.AugAssign):
        yield ast.Pass()
        return
    if not isinstance(node, ast.Assign) or not function or function.name == "__init__":
        return
    if _stored(node) <= _stored(function, before=node.lineno):
        yield ast.Pass()


def take_other_branch(node: Any, around: Around) -> Iterator[ast.AST]:
    """`if a: return b` → `pass`; `b if a else c` → `c`, `b`."""
    leaves = ast.Return | ast.Raise | ast.Continue | ast.Break
    if isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], leaves):
        if node not in getattr(around[0], "orelse", ()):  # `pass` cannot stand for `elif`
            yield ast.Pass()
    elif isinstance(node, ast.IfExp):
        yield from (node.orelse, node.body)


def swap_arithmetic(node: Any, around: Around) -> Iterator[ast.AST]:
    """`a - b` → `a + b`, `a + 1` → `a - 1`, `//` ↔ `%`, `<<` ↔ `>>`, `&` ↔ `|`."""
    op = getattr(node, "op", None)
    left, right = getattr(node, "left", None), getattr(node, "right", getattr(node, "value", None))
    if _sets_time_or_size(node, around) or isinstance(getattr(left, "value", 0), str):
        return
    if isinstance(op, ast.Add) and (_is_number(left) or _is_number(right)):
        yield _with(node, op=ast.Sub())
    elif type(op) in _ARITHMETIC:
        yield _with(node, op=_ARITHMETIC[type(op)]())


def drop_keyword(node: Any, _: Around) -> Iterator[ast.AST]:
    """`f(x, key=y)` → `f(x)`."""
    for place, keyword in enumerate(node.keywords if isinstance(node, ast.Call) else ()):
        if keyword.arg and not _SETS_NOTHING.search(keyword.arg):
            yield _with(node, keywords=[*node.keywords[:place], *node.keywords[place + 1 :]])


def flip_boolean(node: Any, around: Around) -> Iterator[ast.AST]:
    """`True` → `False`, and the reverse."""
    named = _SETS_NOTHING.search(getattr(around[0], "arg", "") or "")
    if isinstance(getattr(node, "value", None), bool) and not named:
        yield ast.Constant(not node.value)


OPERATORS: dict[str, Operator] = {
    operator.__name__.replace("_", " "): operator
    for operator in (
        flip_comparison,
        loosen_comparison,
        shift_constant,
        swap_extremes,
        swap_and_or,
        drop_call,
        swap_arguments,
        shift_slice,
        negate_condition,
        drop_assignment,
        take_other_branch,
        swap_arithmetic,
        drop_keyword,
        flip_boolean,
    )
}

# ---- what gets no fault

_SETS_NOTHING = re.compile(
    "^(strict|help|metavar|prog|epilog|description|name|daemon|encoding|flush|file|stacklevel|doc|"
    "frozen|slots|kw_only|maxsize|allow_abbrev|copy|thread_name_prefix|.*timeout.*|.*_s|.*_ms|.*_bytes)$"
)
"""Keywords that name, describe, or set a time or a size."""
_SETS_SIZE = re.compile(
    "(^|_)(S|MS|SECONDS|TIMEOUT|PATIENCE|BYTES|CHUNK|BUFFER|BLOCK|PIECE|CACHE|POLL|TRIES|ATTEMPTS|"
    "AT_ONCE|MANY|FEW|LARGE|SMALL|SIZE|ROWS|MEMORY|LONGEST|MOST|EVERY|PAUSE|WAIT|WORDS)(_|$)"
)
"""Names of constants of a module that only set a time or a size."""
_SILENT = re.compile(
    "print|warn|debug|info|warning|error|exception|log|write_line|collect|sleep|fsync|madvise|freeze|"
    "set_num_threads|simplefilter"
)
"""Functions that speak, or whose effect no test can see."""
_COMMUTES = re.compile(
    "min|max|minimum|maximum|gcd|isinstance|issubclass|isclose|add|multiply|equal|not_equal|bit_wise_.*|and_.*|or_.*|"
    "xor|logical_.*"
)


def _name_of(function: ast.AST) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _plus(bound: ast.expr | None, step: int) -> ast.expr:
    if bound is None:
        return ast.Constant(step)
    try:
        return ast.Constant(ast.literal_eval(bound) + step)
    except ValueError:
        return ast.BinOp(bound, ast.Add() if step > 0 else ast.Sub(), ast.Constant(1))


def _is_number(node: Any) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _stored(node: ast.AST, before: float = math.inf) -> set[str]:
    """Returns the names that a node gives a value, as parameters or in the lines before one."""
    parts: list[Any] = list(ast.walk(node))
    return {part.arg for part in parts if isinstance(part, ast.arg)} | {
        part.id
        for part in parts
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and part.lineno < before
    }


def _sets_time_or_size(number: Any, around: Around) -> bool:
    """Whether a number only sets how long something takes or how much is done at once."""
    value = getattr(number, "value", None)
    if isinstance(value, int) and value >= 1024 and not value & (value - 1):
        return True
    for node in around:
        if isinstance(node, ast.keyword) and _SETS_NOTHING.search(node.arg or ""):
            return True
        if isinstance(node, ast.Assign | ast.AnnAssign):
            text = ast.unparse(node).partition("=")[0]
            return text.isupper() and bool(_SETS_SIZE.search(text.partition(":")[0].strip()))
    return False


def _changes_nothing(node: ast.AST) -> bool:
    """Whether nothing below a node gets a fault."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Call(func=function) | ast.Expr(value=ast.Call(func=function)):
            return bool(_SILENT.fullmatch(_name_of(function)))
        case ast.FunctionDef(name="__repr__" | "__str__" | "__dir__"):
            return True
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Compare(left=ast.Name("__name__"))):
            return True
        case (
            ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Name("__all__" | "__slots__")])
        ):
            return True
    return False


def _sites(node: ast.AST, around: Around = ()) -> Iterator[tuple[Any, Around]]:
    """Yields the nodes that may get a fault, in the order of the source."""
    if _changes_nothing(node):
        return
    if isinstance(node, ast.expr | ast.stmt | ast.Slice):
        yield node, around
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _sites(child, (node, *around))


def list_mutations(file: str, source: str) -> list[Mutation]:
    """Returns all faults that the operators make of a file."""
    data = source.encode()
    begins = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
    found = []
    for node, around in _sites(ast.parse(source)):
        start = begins[node.lineno - 1] + node.col_offset
        old = data[start : begins[node.end_lineno - 1] + node.end_col_offset].decode()
        line = next(part.lineno for part in (node, *around) if isinstance(part, ast.stmt))
        for name, operator in OPERATORS.items():
            for changed in operator(node, around):
                if ast.dump(changed) != ast.dump(node):
                    found.append(Mutation(file, line, name, start, old, _write(changed, node)))
    return found


def _write(changed: Any, node: ast.AST) -> str:
    """Returns the source of a node that stands for another one. Another kind of expression gets parentheses."""
    text = ast.unparse(ast.fix_missing_locations(changed))
    plain = isinstance(changed, ast.Name | ast.Attribute | ast.Slice | ast.Call | ast.stmt)
    is_same_kind = type(changed) is type(node) and not isinstance(node, ast.BoolOp | ast.BinOp)
    return text if (plain or is_same_kind) and not text.startswith("-") else f"({text})"
