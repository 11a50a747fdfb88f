"""JSON text that holds its own checksum: `write` and `read`. Any flipped bit is noticed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

_KEY = "crc32"


def write(values: Mapping[str, Any]) -> str:
    """Returns a JSON object whose first member is the CRC-32 of all that follows it."""
    rest = json.dumps(values, indent=1)[1:]
    return f'{{"{_KEY}": {zlib.crc32(rest.encode())},{rest}'


def read(text: str | bytes) -> tuple[dict[str, Any], bool]:
    """Returns the values, and whether they have a checksum: earlier versions wrote none. Raises ValueError if the text
    differs from what was written."""
    content = text.encode() if isinstance(text, str) else text
    values = json.loads(content)
    if not isinstance(values, dict):
        raise ValueError("it holds no JSON object")
    stated = values.pop(_KEY, None)
    if stated is not None and stated != zlib.crc32(content.partition(b",")[2].rstrip()):
        raise ValueError(
            f"it is not as it was written (if you changed it yourself, remove its {_KEY!r})"
        )
    return values, stated is not None
