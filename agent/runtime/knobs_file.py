"""Writes and reads knobs as a TOML file: `save` and `load`. A diff of two files is readable."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sluice.common.whole_file import replace_file
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
    """Writes the knobs to a file in one step, and returns its path. Each note becomes a comment line."""
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
    with _naming_the_file(path):
        replace_file(path, "\n".join(lines) + "\n")
    return path


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises KnobError if `save` would. Leaves no file behind."""
    path = Path(path)
    with _naming_the_file(path), tempfile.TemporaryFile(dir=path.parent):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


@contextlib.contextmanager
def _naming_the_file(path: Path) -> Iterator[None]:
    """Turns an OSError into a KnobError that names `path`."""
    try:
        yield
    except OSError as error:
        raise KnobError(
            f"{path}: the knobs cannot be written: {error.strerror}; choose another file"
        ) from None


def load(path: str | os.PathLike[str], limits: Limits | None = None) -> Knobs:
    """Returns the knobs of a file. Knobs that the file does not name are those of `Knobs()`.

    With `limits`, raises KnobError for stages that the pipeline lacks and for values out of range."""
    try:
        text = Path(path).read_text()
        values = tomllib.loads(text)
    except OSError as error:
        raise KnobError(f"{path}: the knobs cannot be read: {error}") from None
    except ValueError as error:
        raise KnobError(f"{path}: is not TOML: {error}") from None
    try:
        knobs = _parse_knobs(values)
        if limits is not None:
            limits.check(knobs)
    except KnobError as error:
        raise KnobError(f"{path}: {error}") from None
    return knobs


def is_file_name(text: str) -> bool:
    """Returns whether the value of `--knobs` is the name of a file and not a list of settings."""
    return text.endswith(".toml") or ("=" not in text and Path(text).is_file())


def _parse_knobs(values: Mapping[str, Any]) -> Knobs:
    """Returns the knobs of parsed TOML. Raises KnobError with the key."""
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
    """Returns a stage's name as a TOML key, in quotes if TOML needs them."""
    bare = stage.replace("_", "").replace("-", "")
    if bare.isascii() and bare.isalnum():
        return stage
    return '"' + stage.replace("\\", "\\\\").replace('"', '\\"') + '"'
