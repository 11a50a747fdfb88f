"""Keeps a server's model up to date: `take_newer` loads a newer checkpoint, and `keep_newest` looks for one at
intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sluice.common.errors import UsageError
from sluice.dlrm.checkpoint.meta import CheckpointMeta
from sluice.dlrm.serving.http import HttpApp, iso_time
from sluice.dlrm.serving.scorer import Scorer

Newest = Callable[[], tuple[Path, CheckpointMeta]]
Load = Callable[[], Scorer]
Say = Callable[[str], None]


async def keep_newest(
    app: HttpApp, newest: Newest, load: Load, say: Say, *, every_s: float
) -> None:
    """Looks every `every_s` seconds, until it is cancelled. 0: never."""
    while every_s:
        await take_newer(app, newest, load, say)
        await asyncio.sleep(every_s)


async def take_newer(app: HttpApp, newest: Newest, load: Load, say: Say) -> bool:
    """Answers with the newest checkpoint once it is loaded. Returns whether it is another one than before.

    A model that cannot be loaded is reported once, and tried again at each call. Its errors do not stop the server."""
    try:
        served = app.scorer.servable
        is_newer = await asyncio.to_thread(newest) != (served.path, served.meta)
        if is_newer:
            app.take(await asyncio.to_thread(load))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a user's module may raise any error, even SystemExit
        # The message of an error of a run, its table or its state suffices without the class.
        is_usual = isinstance(error, UsageError | OSError)
        text = str(error) if is_usual else f"{type(error).__name__}: {error}"
        if text == app.reload.get("error"):
            return False
        app.reload = {"failing": True, "error": text, "since": iso_time(app.wall_clock())}
        app.served.refused.inc()
        report = f"a newer checkpoint cannot be served, so the one before it stays: {text}"
    else:
        app.reload = {"failing": False, "error": None}
        if not is_newer:
            return False
        app.served.taken.inc()
        about = app.scorer.servable.about()
        report = (
            f"now serving {about['checkpoint']}, trained on version {about['version']} of the table"
        )
    with suppress(OSError, ValueError):  # standard error may be closed
        say(report)
    return not app.reload["failing"]
