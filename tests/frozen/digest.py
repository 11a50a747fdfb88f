"""Short hashes of values, the paths of the keys in JSON, and a readable form of a reference."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

OPAQUE = {"incidents", "held_back"}
"""Keys whose values have other keys by chance: by what happened on the machine meanwhile."""


def digest(*parts: Any) -> str:
    """Returns a short hash of bytes, of texts, and of other values as JSON writes them."""
    sums = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        sums.update(len(data).to_bytes(8, "little") + data)
    return sums.hexdigest()[:16]


def key_paths(values: Iterable[Any]) -> list[str]:
    """Returns the paths of all keys in some JSON values, such as `stages.read.busy` and `plan[].name`. A number
    at the end of a key is shown as `*`."""
    return sorted({path for value in values for path in _paths(value, "")})


def _paths(value: Any, path: str) -> Iterator[str]:
    if path.rpartition(".")[2] in OPAQUE:
        yield path
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            shown = re.sub(r"(^| |stage)-?\d+$", r"\1*", name)
            yield from _paths(inner, f"{path}.{shown}" if path else shown)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for inner in value:
            yield from _paths(inner, f"{path}[]")
    else:
        yield path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file with a JSON object in each line."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def readable(value: Any, indent: str = "") -> str:
    """Writes JSON with sorted keys, a line for each key, and lists in one line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(name)}: {readable(value[name], inner)}" for name in sorted(value)]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
