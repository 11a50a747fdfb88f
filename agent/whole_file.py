"""Writes a file so that a reader sees all of it or nothing: `replace_file`."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file completely or not at all. The draft has a random name, so it cannot be a planted link."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(draft, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
