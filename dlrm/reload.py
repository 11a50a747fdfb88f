"""A server's model follows its run: `Reload` looks for a newer checkpoint, and hands it over when it is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from dlrm.meta import CheckpointError, chosen
from dlrm.scorer import Scorer
from dlrm.service import Service
from etl.keys import SpecError
from etl.ops import OperatorError
from etl.state import StateError
from etl.store import StoreError
from etl.table import TableError

ERRORS = (CheckpointError, TableError, StateError, StoreError, SpecError, OperatorError, OSError)
"""What can be wrong with a run, its table or its state."""


class Reload:
    """The old model answers until the new one is loaded. One that cannot be loaded is told of once, and left."""

    def __init__(self, run: Path, load: Callable[[], Scorer], *, every_s: float, say: Callable[[str], None],
                 take_best: bool = False) -> None:
        self._run, self._load, self._every_s, self._say, self._take_best = run, load, every_s, say, take_best
        self._refused = ""

    async def __call__(self, service: Service) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.look(service)

    async def look(self, service: Service) -> bool:
        """Whether a newer model took over."""
        try:
            path, _ = chosen(self._run / "checkpoints", take_best=self._take_best)
            if path == service.scorer.servable.path:
                return False
            scorer = await asyncio.to_thread(self._load)
        except ERRORS as error:
            if str(error) != self._refused:
                self._refused = str(error)
                service.served.reload("refused")
                self._say(f"a newer checkpoint cannot be served, so the one before it stays: {error}")
            return False
        self._refused = ""
        service.take(scorer)
        service.served.reload("taken")
        about = scorer.servable.about()
        self._say(f"now serving {about['checkpoint']}, trained on version {about['version']} of the table")
        return True
