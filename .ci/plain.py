"""Counts the code and what makes it hard to read, and fails where a count or a limit has risen.

python .ci/plain.py            compare with the limits in .ci/plain.json
python .ci/plain.py --lower    set each limit that is too high to today's count
python .ci/plain.py --show     also list the places and the tokens of each folder

A limit only falls: it is at most that of each parent commit, and at most the count of 0.2.0 in .ci/released.json.
There, the demo is counted with the examples.
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("etl", "ingest", "agent", "dlrm", "sluice")
FOLDERS = (*PRODUCT, "benchmarks", "examples", "tests")
LIMITS = Path(__file__).with_name("plain.json")
RELEASED = LIMITS.with_name("released.json")
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
    tokens = {folder: sum(map(count_tokens, python_files(folder))) for folder in FOLDERS}
    counts = {"product": sum(tokens[folder] for folder in PRODUCT)}
    counts |= {folder: tokens[folder] for folder in FOLDERS if folder not in PRODUCT}
    places: dict[str, list[str]] = {"long functions": [], "long sentences": [], "no subject": []}
    for folder in PRODUCT:
        for path in python_files(folder):
            inspect_code(path, places)
    for page in pages():
        inspect_text(page.read_text("utf-8"), str(page), places)
    counts |= {measure: len(places[measure]) for measure in places}
    if "--show" in words:
        print("\n".join(f"{measure}: {place}" for measure in places for place in places[measure]))
        print("\n".join(f"{folder}: {count:,} tokens" for folder, count in tokens.items()))
    if "--lower" in words:
        limits = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
        lowered = {
            measure: min(count, limits.get(measure, count)) for measure, count in counts.items()
        }
        LIMITS.write_text(json.dumps(lowered, indent=1) + "\n")
        return 0
    limits = json.loads(LIMITS.read_text())
    risen = [
        f"{measure}: {count:,}, and the limit is {limits[measure]:,}; "
        "`python .ci/plain.py --show` lists the places"
        for measure, count in counts.items()
        if count > limits[measure]
    ]
    risen += raised_limits(limits)
    readme = len(re.sub(r"```.*?```", "", Path("README.md").read_text(), flags=re.S).split())
    if readme > README_WORDS:
        risen.append(f"README.md: {readme:,} words, and the limit is {README_WORDS:,}")
    for line in risen:
        print(f"plain: {line}", file=sys.stderr)
    return bool(risen)


def raised_limits(limits: dict[str, int]) -> list[str]:
    """Returns a line for each limit that is above the release's count, the last commit's limit or a parent's."""
    earlier = {"0.2.0": json.loads(RELEASED.read_text())}
    for commit in recent_commits():
        text = run_git("show", f"{commit}:.ci/plain.json")
        if text is None:
            return [f"commit {commit} cannot be read: fetch the history (`git fetch --deepen=2`)"]
        earlier[f"commit {commit[:10]}"] = json.loads(text)
    return [
        f"{measure}: its limit of {limits[measure]:,} is above the {before[measure]:,} of {name}, "
        "and limits only fall"
        for name, before in earlier.items()
        for measure in limits
        if limits[measure] > before.get(measure, limits[measure])
    ]


def recent_commits() -> list[str]:
    """Returns the last commit and its parents. Empty in a source archive, which has no history."""
    if not Path(".git").exists():
        print("plain: no history here, so limits are compared with 0.2.0 alone", file=sys.stderr)
        return []
    written = (
        run_git("cat-file", "-p", "HEAD") or ""
    )  # a cut-off history hides parents from git log
    return ["HEAD", *re.findall(r"^parent (\w+)$", written, re.M)]


def run_git(*words: str) -> str | None:
    """Returns what git prints, or None if it fails."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def python_files(folder: str) -> Iterator[Path]:
    """Yields the Python files below a folder, without those behind links."""
    for path in sorted(Path(folder).rglob("*.py")):
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
