"""Notices changes of the machine, and worker processes that died: `IncidentWatch`."""

from __future__ import annotations

from typing import Any

from sluice.agent.runtime_settings import RUNTIME
from sluice.ingest.knobs import format_bytes
from sluice.ingest.stats import Snapshot


class IncidentWatch:
    """Compares each snapshot with the last one."""

    def __init__(self) -> None:
        self._last: Snapshot | None = None
        self._died_from: tuple[int, float] | None = None
        """The restarts before the unreported ones, and when the first of them was seen."""

    def look(self, snapshot: Snapshot) -> list[dict[str, Any]]:
        """Returns an event for each change since the last snapshot."""
        before, self._last = self._last, snapshot
        if before is None:
            return []
        events = []
        if snapshot.cpu_quota != before.cpu_quota:
            text = f"the cores at hand went from {before.cpu_quota:.3g} to {snapshot.cpu_quota:.3g}"
            events.append(incident("cores", text))
        if abs(snapshot.memory_limit / before.memory_limit - 1) > RUNTIME.limit_change_share:
            limits = (format_bytes(limit) for limit in (before.memory_limit, snapshot.memory_limit))
            events.append(incident("memory", f"the memory limit went from {' to '.join(limits)}"))
        return events + self._find_deaths(before, snapshot)

    def _find_deaths(self, before: Snapshot, now: Snapshot) -> list[dict[str, Any]]:
        """Returns an event for worker processes that died, once all ranks have counted their own restarts."""
        if self._died_from is None:
            if now.restarts > before.restarts:
                self._died_from = (before.restarts, now.at)
            return []
        reported, seen_at = self._died_from
        if now.at - seen_at < RUNTIME.interval_s * RUNTIME.early_share:
            return []
        died, self._died_from = now.restarts - reported, None
        what = (
            "a worker process died and was"
            if died == 1
            else f"{died} worker processes died and were"
        )
        return [incident("worker", f"{what} replaced")]


def incident(what: str, text: str, **more: str) -> dict[str, Any]:
    """Returns the event of a change that no decision caused."""
    return {"kind": "incident", "what": what, "text": text, **more}
