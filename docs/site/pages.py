"""A hook of the site's builder: the pages that lie outside docs/.

A link from a page of docs/ may leave that folder, as `../etl/README.md` does, and works so in a checkout. In the site,
whatever is linked so lies below `source/`, in its own place: Markdown and notebooks as pages, any other file as a page
with its text. A folder of docs/ that is linked has a page that lists what it holds. So a link is written once, as the
checkout needs it.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
STARTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the checkout that the site's navigation names."""

_CODE = r"^```.*?^```$|`[^`\n]+`"
_LINK = re.compile(
    rf"(?P<code>{_CODE})|\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)", re.MULTILINE | re.DOTALL
)


class LinkError(Exception):
    """A link of a page that leads nowhere."""


def target_of(page: str, link: str) -> str | None:
    """The path in the checkout that a link of a page means; None for what is no file of ours."""
    if re.match(r"[a-z]+:", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if path.startswith("../") or not (ROOT / path).exists():
        raise LinkError(f"{page}: the link {link!r} leads to no file")
    return path


def place_of(path: str) -> str:
    """Where a file or a folder of the checkout lies in the site's sources."""
    if (ROOT / path).is_dir():
        path += "/index.md"
    inside = path.startswith("docs/")
    # The builder skips folders as .ci.
    path = path.removeprefix("docs/") if inside else "source/" + re.sub(r"(^|/)\.", r"\1", path)
    return path if inside or path.endswith(".md") else f"{path}.md"


def links_of(page: str, text: str) -> Iterator[str]:
    """The files and folders of the checkout that a page links."""
    for link in _LINK.finditer(text):
        if link["target"] and (path := target_of(page, link["target"])):
            yield path


def with_places(page: str, text: str) -> str:
    """The text of a page with its links as the site needs them."""
    here = posixpath.dirname(place_of(page))

    def placed(link: re.Match[str]) -> str:
        path = link["target"] and target_of(page, link["target"])
        return (
            f"]({posixpath.relpath(place_of(path), here)}{link['anchor'] or ''})"
            if path
            else link[0]
        )

    return _LINK.sub(placed, text)


def page_of(path: str) -> str:
    """The Markdown of the page that shows a file or lists a folder of the checkout."""
    whole = ROOT / path
    if whole.is_dir():
        pages = sorted(whole.glob("*.md"))
        titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in pages]
        return f"# {whole.name.capitalize()}\n\n" + "".join(
            f"- [{title}]({page.name})\n" for title, page in zip(titles, pages, strict=True)
        )
    text = whole.read_text()
    if path.endswith(".ipynb"):
        return with_places(path, "\n\n".join(map(_cell, json.loads(text)["cells"])))
    if path.endswith(".md"):
        return with_places(path, text)
    return f"# {path}\n\n```{whole.suffix.removeprefix('.')}\n{text.rstrip()}\n```\n"


def _cell(cell: dict[str, Any]) -> str:
    """The Markdown of a notebook's cell."""
    source = "".join(cell["source"])
    return source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"


def outside() -> set[str]:
    """The files outside docs/ that its pages link, directly or through each other, and folders of docs/ that are
    linked."""
    ahead = [*STARTS, *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    known: set[str] = set()
    while ahead:
        path = ahead.pop()
        if path not in known:
            known.add(path)
            if path.endswith((".md", ".ipynb")):
                ahead += links_of(path, (ROOT / path).read_text())
    return {path for path in known if not path.startswith("docs/") or (ROOT / path).is_dir()}


# ---- what the builder calls


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from outside docs/."""
    from mkdocs.structure.files import File

    for path in sorted(outside()):
        files.append(File.generated(config, place_of(path), content=page_of(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads the links of the pages in docs/ to the places in the site."""
    if page.file.generated_by:
        return markdown
    return with_places(f"docs/{page.file.src_uri}", markdown)
