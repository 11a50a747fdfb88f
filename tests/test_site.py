"""The site's pages: examples run, quoted messages are the sources', links lead somewhere. `make docs` builds it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import sluice
from docs.site import built, pages
from tests.e2e.test_adapters import ADAPTERS
from tests.e2e.test_readme import blocks
from tests.raises import MISTAKES, assert_names, raises
from tests.test_architecture import tree

ROOT = Path(__file__).resolve().parent.parent
HOW_TO = sorted(
    f"docs/how-to/{page.name}"
    for page in (ROOT / "docs" / "how-to").glob("*.md")
    if page.stem not in ("index", *ADAPTERS)
)
"""The pages that need nothing but the product; those of other packages are run by the tests of their adapters."""
FEWER = {
    "rows = 50_000": "rows = 5_000",
    "seconds=0.5": "seconds=0.1",
    "range(8)": "range(2)",
    "9100": "0",
}


# ---- examples


@pytest.mark.slow
def test_the_tutorial_and_the_pages_after_it_work_in_the_order_of_a_reader(tmp_path, forks):
    """In one process, for the imports; each page anew, but with the tutorial's files."""
    sources = ["\n".join(blocks("python", page)) for page in ("docs/tutorial.md", *HOW_TO)]
    assert all(sources)
    for many, few in FEWER.items():
        assert many in "".join(sources)
        sources = [source.replace(many, few) for source in sources]
    (tmp_path / "reader.py").write_text(
        "".join(
            f"exec(compile({source!r}, {page!r}, 'exec'), {{'__name__': 'page'}})\n"
            for page, source in zip(("tutorial", *HOW_TO), sources, strict=True)
        )
    )
    done = forks.run("reader", tmp=tmp_path, cwd=tmp_path)
    assert "of 19 steps were left" in done.stdout
    assert (tmp_path / "run" / "report.html").is_file()


# ---- troubleshooting


@cache
def messages() -> str:
    """Every text of the product's sources but docstrings, with … for values, separated by zero bytes."""
    texts = set()
    for package in ("sluice", "etl", "ingest", "agent", "dlrm"):
        for path in (ROOT / package).rglob("*.py"):
            nodes = list(ast.walk(tree(path)))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    texts.add(
                        "".join(
                            part.value if isinstance(part, ast.Constant) else "…"
                            for part in node.values
                        )
                    )
                elif (
                    isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                    and id(node) not in docstrings
                ):
                    texts.add(node.value)
    return "\0".join(texts)


def quoted() -> list[str]:
    return re.findall(
        r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )


def holds(texts: str, message: str) -> bool:
    """Whether one of the texts contains the parts of a quoted message in their order. Each … stands for a value, and
    for words that the quotation leaves out."""
    return re.search("…[^\0]*?".join(map(re.escape, message.split("…"))), texts) is not None


def test_each_message_of_troubleshooting_is_one_of_ours_and_has_an_answer():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    answers = re.findall(r"^### `[^\n]*`\n\n(.+?)\n(?=\n#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(answers) == len(quoted()) == len(set(quoted())) > 0
    assert [message for message in quoted() if not holds(messages(), message)] == []


# ---- links and navigation


def test_every_link_between_pages_leads_somewhere():
    """Also those of the READMEs; a heading that is named must be there (`make docs` checks all of them)."""
    linked = pages.outside()
    assert {"README.md", "CONTRIBUTING.md", "etl/README.md", "docs/decisions"} <= linked
    assert all((ROOT / path).exists() for path in linked)


def test_a_link_that_leads_nowhere_is_an_error():
    with raises(pages.LinkError, "docs/tuning.md", "'lost.md'"):
        list(pages.links_of("docs/tuning.md", "[x](lost.md)"))


def test_the_navigation_has_every_page():
    named = set(
        re.findall(
            r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.MULTILINE
        )
    )
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    outside = ("decisions/", "pictures/")
    assert {page for page in there if not page.startswith(outside)} <= named
    assert {page for page in named if not page.startswith("source/")} <= there


# ---- the reference


def test_the_reference_names_what_is_there():
    named = re.findall(r"^::: (sluice\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    homes = {f"{home}.{name}" for name, home in sluice._HOMES.items()}
    assert homes <= set(named), "each public name has its place"


# ---- what was built


@pytest.mark.parametrize(
    ("file", "content", "facts"),
    MISTAKES["site"],
)
def test_a_page_that_fetches_from_other_sites_or_links_nowhere_is_found(
    tmp_path, file, content, facts
):
    (tmp_path / "other.html").write_text('<h1 id="there"></h1>')
    (tmp_path / file).write_text(content)
    (mistake,) = built.mistakes(tmp_path)
    assert_names(mistake, file, *facts)
