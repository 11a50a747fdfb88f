"""Keeps a server's model up to date: `Reload` looks for newer checkpoints and loads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from sluice.common.errors import UsageError
from sluice.dlrm.checkpoint.meta import find_checkpoint
from sluice.dlrm.serving.http import HttpApp, iso_time
from sluice.dlrm.serving.scorer import Scorer


@dataclass
class Reload:
    """Serves the old model until the new one is loaded. A model that cannot be loaded is reported once, and tried again
    at each check. Its errors do not stop the server."""

    run: Path
    load: Callable[[], Scorer]
    _: KW_ONLY
    every_s: float
    say: Callable[[str], None]
    take_best: bool = False
    wall_clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._error: str | None = None
        """The reason why the newest checkpoint is not served."""
        self._failing_since = 0.0

    async def __call__(self, service: HttpApp) -> None:
        """Checks every `every_s` seconds, until it is cancelled."""
        while True:
            await asyncio.sleep(self.every_s)
            await self.look(service)

    async def look(self, service: HttpApp) -> bool:
        """Checks once for a newer model. Returns whether the server uses one now."""
        try:
            newest = await asyncio.to_thread(
                find_checkpoint, self.run / "checkpoints", take_best=self.take_best
            )
            served = service.scorer.servable
            is_newer = newest != (served.path, served.meta)
            if is_newer:
                service.take(await asyncio.to_thread(self.load))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a user's module may raise any error, even SystemExit
            # The message of an error of a run, its table or its state suffices without the class.
            is_usual = isinstance(error, UsageError | OSError)
            text = str(error) if is_usual else f"{type(error).__name__}: {error}"
            if text != self._error:
                self._error, self._failing_since = text, self.wall_clock()
                service.served.refused.inc()
                self._report(
                    f"a newer checkpoint cannot be served, so the one before it stays: {text}"
                )
            return False
        self._error = None
        if not is_newer:
            return False
        service.served.taken.inc()
        about = service.scorer.servable.about()
        self._report(
            f"now serving {about['checkpoint']}, trained on version {about['version']} of the table"
        )
        return True

    def about(self) -> dict[str, Any]:
        """Returns the state of these checks, for `/health`."""
        since = {} if self._error is None else {"since": iso_time(self._failing_since)}
        return {"failing": self._error is not None, "error": self._error, **since}

    def _report(self, text: str) -> None:
        with suppress(OSError, ValueError):  # standard error may be closed
            self.say(text)
