"""The base classes of a user's mistakes, and other ends of a program. Standard library only, because every package uses
this file."""

from __future__ import annotations

import re
from typing import Any

_KEYS = re.compile(r"(?<=://)[^/@\s'\"]+:[^/@\s'\"]*(?=@)")
_SECRETS = re.compile(
    r"(?<=[?&])(\w*(?:secret|token|password|access_key|sig)\w*=)[^&\s'\";,)]+", re.IGNORECASE
)


def without_keys(text: str) -> str:
    """Returns a text without the keys and passwords in its URIs, for messages: `s3://***@bucket/table?secret_key=***`."""
    if "://" not in text:
        return text
    return _SECRETS.sub(r"\1***", _KEYS.sub("***", text))


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Returns a text as a terminal may show it: without keys, and with control characters as escapes. So a name or a
    value in data changes no colour, moves no cursor and turns no line around."""
    shown = _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return without_keys(shown)


class UsageError(ValueError):
    """A user's mistake. The message names what is wrong and what to do.

    A program prints the message in one line and ends with 2 (`sluice.common.program`).
    """

    def __init__(self, *about: Any) -> None:
        super().__init__(*(without_keys(part) if isinstance(part, str) else part for part in about))


class RunFailure(RuntimeError):
    """A run that cannot be finished. A program prints the message without a traceback, and ends with 1."""


class Preempted(Exception):
    """SIGTERM ended a run after it had saved. `result` is the program's last line, if this process prints one."""

    def __init__(self, result: dict[str, Any] | None) -> None:
        super().__init__("preempted and saved")
        self.result = result


class OperatorError(UsageError):
    """Invalid parameters of an operator, or a function of a spec that may not be imported. The
    message names the parameter and what to write."""


class InputError(UsageError):
    """Input that cannot be read. The message names the path and what is wrong."""
