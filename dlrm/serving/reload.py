"""Keeps a server's model up to date: `take_newer` loads a newer checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from sluice.common.errors import UsageError
from sluice.dlrm.checkpoint.meta import find_checkpoint
from sluice.dlrm.serving.http import HttpApp, iso_time
from sluice.dlrm.serving.scorer import Scorer

Load = Callable[[], Scorer]
Say = Callable[[str], None]


async def take_newer(app: HttpApp, load: Load, say: Say, *, take_best: bool = False) -> bool:
    """Answers with the run's newest or best checkpoint once it is loaded. Returns whether it is another than before.

    A model that cannot be loaded is reported once, and tried again at each call. Its errors do not stop the server."""
    try:
        served = app.scorer.servable
        look = partial(find_checkpoint, served.path.parent, take_best=take_best)
        is_newer = await asyncio.to_thread(look) != (served.path, served.meta)
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
