"""Counts the code and what makes it hard to read, and fails where a count is above its budget.

python .ci/plain.py            compare with the budgets in .ci/plain.json
python .ci/plain.py --show     also list the places and the count of each folder

A room may be 3 % above its budget while a step goes on. At the end of a step, a person lowers the budgets of the
rooms that are at or below them.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("etl", "ingest", "agent", "dlrm", "sluice")
FOLDERS = (*PRODUCT, "benchmarks", "examples", "tests")
BUDGETS = Path(__file__).with_name("plain.json")
SLACK = 1.03
LONG_LINE_OF_C = 100
LONG_SENTENCE = 30
LONG_FUNCTION = 60
README_WORDS = 1000
NO_SUBJECT = re.compile(
    r"(?:^|(?<=[.!?] ))(?:Who|Whoever|Of|Nobody|Wherever|That which|Whether what)\b"
)
BLOCK = re.compile(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |^#.*$", re.M)
"""What separates paragraphs, list items and headings."""
CODE = re.compile(r"```.*?```|`[^`]*`", re.S)


def main(words: list[str]) -> int:
    counts = {folder: sum(map(count_tokens, python_files(folder))) for folder in FOLDERS}
    places: dict[str, list[str]] = {
        "long functions": [],
        "long sentences": [],
        "no subject": [],
        "long lines of C": [],
    }
    counts["lines of C"] = sum(inspect_c(path, places) for path in c_files())
    for folder in PRODUCT:
        for path in python_files(folder):
            inspect_code(path, places)
    for page in pages():
        inspect_text(page.read_text("utf-8"), str(page), places)
    if "--show" in words:
        print("\n".join(f"{measure}: {place}" for measure in places for place in places[measure]))
        print("\n".join(f"{folder}: {count:,}" for folder, count in counts.items()))
        print(f"product: {sum(counts[folder] for folder in PRODUCT):,}")
    counts |= {measure: len(places[measure]) for measure in places}
    budgets = json.loads(BUDGETS.read_text())
    exceeded = [
        f"{measure}: {count:,}, and the budget is {budgets[measure]:,}; "
        "`python .ci/plain.py --show` lists the places"
        for measure, count in counts.items()
        if count > SLACK * budgets[measure]
    ]
    readme = len(re.sub(r"```.*?```", "", Path("README.md").read_text(), flags=re.S).split())
    if readme > README_WORDS:
        exceeded.append(f"README.md: {readme:,} words, and the limit is {README_WORDS:,}")
    for line in exceeded:
        print(f"plain: {line}", file=sys.stderr)
    return bool(exceeded)


def c_files() -> Iterator[Path]:
    """Yields the product's files of C, without those behind links."""
    for folder in PRODUCT:
        for path in sorted(Path(folder).rglob("*.c")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def inspect_c(path: Path, places: dict[str, list[str]]) -> int:
    """Notes the lines that are too long. Returns how many lines the file has."""
    lines = path.read_text("utf-8").splitlines()
    places["long lines of C"] += [
        f"{path}:{number}" for number, line in enumerate(lines, 1) if len(line) > LONG_LINE_OF_C
    ]
    return len(lines)


def python_files(folder: str) -> Iterator[Path]:
    """Yields the Python files below a folder, without those behind links."""
    for path in sorted(Path(folder).rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents):
            yield path


def pages() -> Iterator[Path]:
    """Yields the pages that are written for readers."""
    yield Path("README.md")
    yield from sorted(Path("docs").rglob("*.md"))


def count_tokens(path: Path) -> int:
    """Counts names, operators, numbers and strings, but no comma before a closing bracket."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    texts = [token.string for token in tokens if token.type in kinds]
    before_closing = sum(
        text == "," and after in (")", "]", "}") for text, after in itertools.pairwise(texts)
    )
    return len(texts) - before_closing


def inspect_code(path: Path, places: dict[str, list[str]]) -> None:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONG_FUNCTION:
                places["long functions"].append(f"{path}:{node.lineno} {node.name}, {lines} lines")
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            inspect_text(
                ast.get_docstring(node) or "", f"{path}:{getattr(node, 'lineno', 1)}", places
            )


def inspect_text(text: str, place: str, places: dict[str, list[str]]) -> None:
    for block in BLOCK.split(CODE.sub("x", text)):
        flat = re.sub(r"\|[^|]*", " . ", re.sub(r"\s+", " ", block))
        for sentence in re.split(r"(?<=[.!?:;])\s", flat):
            if len(sentence.split()) > LONG_SENTENCE:
                places["long sentences"].append(f"{place} {sentence[:80]}")
        for match in NO_SUBJECT.finditer(flat):
            places["no subject"].append(f"{place} {flat[match.start() :][:80]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
