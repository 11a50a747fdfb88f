"""Counts what makes code and pages hard to read, and fails where a count has risen.

python .ci/plain.py            compare with the limits in .ci/plain.json
python .ci/plain.py --lower    set each limit that is too high to today's count
python .ci/plain.py --show     also list the places
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

PACKAGES = ("etl", "ingest", "agent", "dlrm", "sluice")
LIMITS = Path(__file__).with_name("plain.json")
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
    counts = {"tokens": sum(count_tokens(path) for path in python_files())}
    places: dict[str, list[str]] = {"long functions": [], "long sentences": [], "no subject": []}
    for path in python_files():
        inspect_code(path, places)
    for page in pages():
        inspect_text(page.read_text("utf-8"), str(page), places)
    counts |= {measure: len(found) for measure, found in places.items()}
    if "--show" in words:
        print("\n".join(f"{measure}: {place}" for measure in places for place in places[measure]))
    if "--lower" in words:
        limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
        lowered = {
            measure: min(count, limits.get(measure, count)) for measure, count in counts.items()
        }
        LIMITS.write_text(json.dumps(lowered, indent=1) + "\n")
        return 0
    limits = json.loads(LIMITS.read_text())
    risen = [
        f"{measure}: {count:,}, and the limit is {limits[measure]:,}"
        for measure, count in counts.items()
        if count > limits[measure]
    ]
    readme = len(re.sub(r"```.*?```", "", Path("README.md").read_text(), flags=re.S).split())
    if readme > README_WORDS:
        risen.append(f"README.md: {readme:,} words, and the limit is {README_WORDS:,}")
    for line in risen:
        print(f"plain: {line}; `python .ci/plain.py --show` lists the places", file=sys.stderr)
    return bool(risen)


def python_files() -> Iterator[Path]:
    """Yields the product's Python files, without those behind links."""
    for package in PACKAGES:
        for path in sorted(Path(package).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def pages() -> Iterator[Path]:
    """Yields the pages that are written for readers: not the log, which is never rewritten."""
    yield Path("README.md")
    for path in sorted(Path("docs").rglob("*.md")):
        if "log" not in path.parts:
            yield path


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
