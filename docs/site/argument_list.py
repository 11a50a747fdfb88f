"""A docstring's sentences on arguments as a list.

Our docstrings tell of arguments in prose, each beginning a line by its name: "`seed` is …". On a page they would run
into one paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_CODE = re.compile(r"(`[^`]*`)")


def as_list(text: str, arguments: Collection[str]) -> str:
    """The text with each line that begins with an argument's name, after the end of a sentence, as an item of a
    list."""
    lines: list[str] = []
    ended, within = True, False
    for line in text.splitlines():
        name = re.match(r"`(\w+)`", line)
        if name and name[1] in arguments and ended:
            lines += [*([""] if lines and lines[-1] and not within else []), f"- {line}"]
            within = True
        else:
            within = within and bool(line)
            lines.append(f"  {line}" if within else line)
        ended = not line or line.rstrip().endswith((".", ":"))
    return "\n".join(
        "".join(
            part if part.startswith("`") else part.replace("*", r"\*") for part in _CODE.split(line)
        )
        for line in lines
    )
