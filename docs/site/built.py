"""Checks a site that was built: no page fetches anything from elsewhere, and each link of a page leads somewhere.

    python docs/site/built.py build/docs

The builder checks what is written in Markdown; this looks at what came out, the theme's part of each page too.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
    "link": "href",
}
"""What a browser fetches by itself when it shows a page, and the attribute that says from where."""
NOT_FETCHED = {"canonical", "next", "prev", "alternate", "edit"}
"""Kinds of `link` that only name an address."""
_IN_STYLE = re.compile(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)")


class Page(HTMLParser):
    """The addresses in a page: what it fetches, what it links, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.fetched += _IN_STYLE.findall(given.get("style", ""))
        if tag == "a" and "href" in given:
            self.linked.append(given["href"])
        where = FETCHED.get(tag)
        if where in given and not (
            tag == "link" and NOT_FETCHED & set(given.get("rel", "").split())
        ):
            self.fetched.append(given[where])
        if "srcset" in given:
            self.fetched += [part.split()[0] for part in given["srcset"].split(",")]

    handle_startendtag = handle_starttag


def mistakes(site: Path) -> list[str]:
    """What is wrong in a site, a line each."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong = [] if pages else [f"{site}: no page"]
    for path in sorted(site.rglob("*.css")):
        wrong += [
            f"{path.relative_to(site)}: fetches {url}"
            for url in _IN_STYLE.findall(path.read_text("utf-8"))
        ]
    for path, page in pages.items():
        name = path.relative_to(site)
        for url in page.fetched:
            if url.startswith("data:"):
                continue
            if urlsplit(url).netloc or urlsplit(url).scheme:
                wrong.append(f"{name}: fetches {url}")
            elif not _file(site, path, url).is_file():
                wrong.append(f"{name}: fetches {url}, which is not there")
        for url in page.linked:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            there = _file(site, path, url) if parts.path else path
            if not there.is_file():
                wrong.append(f"{name}: links {url}, which is not there")
            elif (
                parts.fragment
                and there in pages
                and unquote(parts.fragment) not in pages[there].anchors | {"__top"}
            ):
                wrong.append(f"{name}: links {url}, which has no such part")
    return wrong


def _file(site: Path, page: Path, url: str) -> Path:
    path = unquote(urlsplit(url).path)
    there = (site / path.lstrip("/") if path.startswith("/") else page.parent / path).resolve()
    return there / "index.html" if there.is_dir() else there


if __name__ == "__main__":
    wrong = mistakes(Path(sys.argv[1]).resolve())
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)
