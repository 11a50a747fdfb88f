"""Reads the files with which remote workers and their loaders recognise each other."""

from __future__ import annotations

import re
from pathlib import Path

from sluice.common.errors import UsageError


def read_token(path: str) -> str:
    """Reads the token that a worker and its loaders share."""
    token = read_file(path).decode(errors="replace").strip()
    if not re.fullmatch("[ -~]{1,4096}", token):
        raise UsageError(
            f"token file {path}: a token is 1 to 4,096 printable ASCII characters; write another, "
            "such as `openssl rand -hex 32` prints"
        )
    return token


def read_file(path: str) -> bytes:
    """Reads a token, a key or a certificate."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
