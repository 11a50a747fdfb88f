"""Runs commands of `sluice` in this process."""

from __future__ import annotations

import contextlib
import io
from importlib import import_module
from typing import Any

from sluice.__main__ import VERBS


class CommandFailed(Exception):
    """A command has failed: the message holds what it printed."""


def call(verb: str, *words: object) -> dict[str, Any]:
    """Returns the JSON object with which a command ends."""
    module, _ = VERBS[verb]
    said = io.StringIO()
    argv = [*([verb] if module.endswith("__main__") else []), *map(str, words)]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            return dict(import_module(module).main(argv))
        except (Exception, SystemExit) as error:
            raise CommandFailed(
                f"sluice {verb} {' '.join(argv)}: {error}\n{said.getvalue()}"
            ) from error
