"""Formats texts for a person on a terminal."""

from __future__ import annotations

import re
import shutil
import textwrap

_LISTED = re.compile(r" +\S+( \S+)? {2,}(?=\S)")
"""The start of a line that explains a word."""


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Formats rows of texts as aligned columns, a line for each row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def wrapped(text: str, width: int = 0) -> str:
    """Wraps the paragraphs of a text, and lists of words with their meanings. Other indented lines are commands, and
    stay as they are. The default width is that of the terminal; without a terminal it is COLUMNS, or 80."""
    width = width or shutil.get_terminal_size().columns
    blocks: list[str] = []
    for line in text.splitlines():
        follows = blocks and blocks[-1] and not blocks[-1].startswith(" ")
        if line and not line.startswith(" ") and follows:
            blocks[-1] += f" {line}"
        else:
            blocks.append(line)
    for number, block in enumerate(blocks):
        listed = _LISTED.match(block)
        if listed or not block.startswith(" "):
            blocks[number] = textwrap.fill(
                block,
                width,
                subsequent_indent=" " * listed.end() if listed else "",
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(blocks)
