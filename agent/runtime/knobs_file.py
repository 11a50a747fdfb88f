"""A choice of knobs as a TOML file: `save` and `load`. Readable in a diff, and checked when it is read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.ingest.knobs import (
    NAMES,
    SIZES,
    KnobError,
    Knobs,
    Limits,
    format_bytes,
    nearest,
    parse_bytes,
)


def save(path: str | os.PathLike[str], knobs: Knobs, *, notes: Sequence[str] = ()) -> Path:
    """Replaces the file in one step. Each note becomes a line of comment."""
    lines = [f"# {line}" for note in notes for line in note.splitlines()]
    lines += [
        f"{name} = {getattr(knobs, name)}  # {format_bytes(getattr(knobs, name))}" for name in SIZES
    ]
    if knobs.fused:
        lines.append(f"fused = {json.dumps(sorted(knobs.fused))}")
    lines += [
        "",
        "[workers]",
        *(f"{_key(stage)} = {count}" for stage, count in knobs.workers.items()),
    ]
    if knobs.backend:
        lines += [
            "",
            "[backend]",
            *(f'{_key(stage)} = "{name}"' for stage, name in knobs.backend.items()),
        ]
    path = Path(path)
    with _written(path) as temporary:
        with open(
            temporary, "x", encoding="utf-8"
        ) as file:  # never through a link that somebody put there
            file.write("\n".join(lines) + "\n")
        temporary.replace(path)
    return path


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises KnobError where `save` would, and leaves nothing."""
    with _written(Path(path)) as temporary:
        temporary.touch(exist_ok=False)
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Path]:
    """A temporary file to write, which then takes the place of `path`; it is gone afterwards."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
    except OSError as error:
        raise KnobError(
            f"{path}: the knobs cannot be written: {error.strerror}; choose another file"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def load(path: str | os.PathLike[str], limits: Limits | None = None) -> Knobs:
    """Reads the knobs in a file; those that it does not name are as in `Knobs()`. With `limits`, stages that the
    pipeline lacks and values out of range are refused by name."""
    try:
        text = Path(path).read_text()
        values = tomllib.loads(text)
    except OSError as error:
        raise KnobError(f"{path}: the knobs cannot be read: {error}") from None
    except ValueError as error:
        raise KnobError(f"{path}: is not TOML: {error}") from None
    try:
        knobs = _knobs(values)
        if limits is not None:
            limits.check(knobs)
    except KnobError as error:
        raise KnobError(f"{path}: {error}") from None
    return knobs


def is_file_name(text: str) -> bool:
    """Whether the value of `--knobs` names a file rather than being a list of settings."""
    return text.endswith(".toml") or ("=" not in text and Path(text).is_file())


def _knobs(values: Mapping[str, Any]) -> Knobs:
    for key in values:
        if key not in NAMES:
            raise KnobError(f"unknown key {key!r}{nearest(key, NAMES)}")
    for key in ("workers", "backend"):
        if not isinstance(values.get(key, {}), dict):
            raise KnobError(
                f"{key}: {values[key]!r} is no table of stages; write [{key}] and a line for each"
            )
    sizes = {}
    for key in SIZES:
        if key in values:
            size = values[key]
            if isinstance(size, bool) or not isinstance(size, (int, str)):
                raise KnobError(f"{key}: {size!r} is not a number of bytes")
            sizes[key] = parse_bytes(size)
    if not isinstance(values.get("fused", []), list):
        raise KnobError(f"fused: {values['fused']!r} is no list of stages")
    return Knobs(
        workers=values.get("workers", {}),
        backend=values.get("backend", {}),
        fused=values.get("fused", frozenset()),
        **sizes,
    )


def _key(stage: str) -> str:
    """A stage's name as a TOML key: bare where TOML allows it, else in quotes."""
    bare = stage.replace("_", "").replace("-", "")
    if bare.isascii() and bare.isalnum():
        return stage
    return '"' + stage.replace("\\", "\\\\").replace('"', '\\"') + '"'
