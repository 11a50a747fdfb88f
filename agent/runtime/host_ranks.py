"""One agent tunes all ranks of a host: ranks publish their snapshots, and the agent's knobs reach them all.

They use a key-value store (a clone of torch's, with its own connection) with one overwritten key a rank and one a
host: `check` comes before `get`, and nothing ever waits. Ranks need not agree on a step, as the order of rows does not
depend on knobs.

    every rank           HostMember(store, host, local_rank, loader).start()
    local rank 0 also has  Controller(HostTunable(store, host, loader, ranks={host: n, ...}), policy, ...)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from sluice.agent.runtime.ticker import Ticker
from sluice.agent.runtime_settings import RUNTIME
from sluice.agent.tunable import Tunable
from sluice.ingest.knobs import KnobError, Knobs, Limits
from sluice.ingest.stats import Snapshot, StageStats

_STAGE_SUMS = (
    "items",
    "rows",
    "bytes",
    "busy_s",
    "cpu_s",
    "core_wait_s",
    "wait_input_s",
    "wait_output_s",
)
_SUMS = ("batches", "rows", "cpu_used_s", "held_back", "held_back_pressure")
_LARGEST = ("workers", "queue_bytes", "queue_limit_bytes", "process_bytes")
_OF_A_WORKER = {"requests_a_core", "start_s"}
_WHOLE = {"items", "rows", "bytes", "batches", "held_back", "held_back_pressure", "restarts"}


class RankStore(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def _snapshot_key(host: str, rank: int) -> str:
    return f"sluice/{host}/{rank}/snapshot"


def _knobs_key(host: str) -> str:
    return f"sluice/{host}/knobs"


def _get(store: RankStore, key: str) -> Any:
    """The JSON at a key, None if there is none yet."""
    return json.loads(store.get(key)) if store.check([key]) else None


class HostMember:
    """A rank's side: publishes its snapshots, applies the host's knobs."""

    def __init__(
        self,
        store: RankStore,
        host: str,
        local_rank: int,
        tunable: Tunable,
        *,
        interval_s: float = RUNTIME.publish_s,
    ) -> None:
        self._store, self._tunable = store, tunable
        self._snapshot_key, self._knobs_key = _snapshot_key(host, local_rank), _knobs_key(host)
        self._applied = 0
        self.interval_s = interval_s
        self.fault: str | None = None
        """Why the member stopped by itself; training goes on with the knobs as they are."""
        self.refused: str | None = None
        """Why the last knobs could not be applied here; the next ones may be."""
        self._ticker = Ticker("sluice-member", lambda: self.interval_s, self._safe_step)

    def step(self) -> None:
        """Publishes one snapshot, and applies knobs that are new."""
        self._store.set(self._snapshot_key, json.dumps(self._tunable.snapshot().to_dict()))
        published = _get(self._store, self._knobs_key)
        if published is not None and published["number"] > self._applied:
            self._applied = published["number"]
            try:
                self._tunable.apply(Knobs.from_dict(published["knobs"]))
                self.refused = None
            except KnobError as error:  # this rank's limits moved in the meantime
                self.refused = str(error)

    def start(self) -> HostMember:
        """Runs steps in a separate thread until `stop()`."""
        self._ticker.start()
        return self

    def _safe_step(self) -> bool:
        try:
            self.step()
        except Exception as error:  # a closed store or pipeline must never disturb the trainer
            self.fault = f"{type(error).__name__}: {error}"
            return False
        return True

    def stop(self) -> None:
        """Ends the thread and publishes a last snapshot. May be called twice."""
        self._ticker.stop()
        if self.fault is None:
            self._safe_step()

    def __enter__(self) -> HostMember:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class HostTunable:
    """The host's ranks as one pipeline: a rank's mean share of rows, work, cores and memory, and the same knobs for
    all.

    A rank's snapshot has the host's core quota and memory limit; here both are divided by the ranks that share them.
    The stall is the largest of any rank on any host: at each step all wait for the slowest, so the others look bound by
    their trainer although they wait for another rank's input. So cores are given back only if no rank stalls."""

    def __init__(
        self, store: RankStore, host: str, tunable: Tunable, *, ranks: Mapping[str, int]
    ) -> None:
        """`tunable` is local rank 0's; `ranks` names all hosts and how many ranks each has."""
        if ranks.get(host, 0) < 1:
            raise ValueError(
                f"ranks: {dict(ranks)!r} does not tell how many ranks host {host!r} has"
            )
        self._store = store
        self._host = host
        self._tunable = tunable
        self._ranks = dict(ranks)
        self._knobs = tunable.knobs
        self._number = 0
        self._latest: dict[tuple[str, int], Snapshot] = {}
        self._stalls: dict[tuple[str, int], float] = {}
        self._merged: Snapshot | None = None
        self._sums: dict[tuple[str, str], float] = {}  # the merged counters before they are rounded

    @property
    def limits(self) -> Limits:
        return self._tunable.limits

    @property
    def knobs(self) -> Knobs:
        return self._knobs

    def apply(self, knobs: Knobs) -> None:
        self.limits.check(knobs)
        self._number += 1
        self._store.set(
            _knobs_key(self._host), json.dumps({"number": self._number, "knobs": knobs.to_dict()})
        )
        self._knobs = knobs

    def snapshot(self) -> Snapshot:
        """The merged snapshot; the same one again while no local rank has published anything new."""
        steps = self._collect()
        local = [s for (host, _), s in self._latest.items() if host == self._host]
        if self._merged is not None and not any(host == self._host for host, _ in steps):
            return self._merged
        gains = [step for (host, _), step in steps.items() if host == self._host]
        self._merged = self._merge(local or [self._tunable.snapshot()], gains)
        return self._merged

    def _collect(self) -> dict[tuple[str, int], tuple[Snapshot, Snapshot]]:
        """Rank → (its last snapshot, its new one), for ranks that have published a new one."""
        steps = {}
        for host, count in self._ranks.items():
            for rank in range(count):
                published = _get(self._store, _snapshot_key(host, rank))
                if published is None:
                    continue
                latest, previous = Snapshot.from_dict(published), self._latest.get((host, rank))
                self._latest[host, rank] = latest
                if previous is None or latest.sequence < previous.sequence:
                    continue  # the first snapshot of a rank, or of a restarted one, has none before it
                if latest.sequence > previous.sequence:
                    steps[host, rank] = (previous, latest)
                    wait = latest.consumer_wait_s - previous.consumer_wait_s
                    total = wait + latest.consumer_compute_s - previous.consumer_compute_s
                    if total > 0:
                        self._stalls[host, rank] = min(max(wait / total, 0.0), 1.0)
        return steps

    def _merge(
        self, local: Sequence[Snapshot], gains: Sequence[tuple[Snapshot, Snapshot]]
    ) -> Snapshot:
        """Merges snapshots: counters grow by the ranks' mean; present values are the largest, or a rank's share."""
        share, first = self._ranks[self._host], local[0]

        def gained(name: str) -> float:
            return _rise(gains, name) / share

        step_s = gained("consumer_wait_s") + gained("consumer_compute_s")
        stall = max(self._stalls.values(), default=0.0)
        counters: dict[str, Any] = {
            name: self._sum("", name, gained(name)) for name in ("at", *_SUMS)
        }
        counters["restarts"] = self._sum(
            "", "restarts", _rise(gains, "restarts")
        )  # of all ranks: none died by half
        idle_is_known = all(s.cores_idle_s is not None for s in (first, *itertools.chain(*gains)))
        return replace(
            first,
            **counters,
            sequence=self._merged.sequence + 1 if self._merged else 0,
            stages=tuple(
                self._merge_stage(
                    [s.stage(name) for s in local],
                    [(earlier.stage(name), later.stage(name)) for earlier, later in gains],
                )
                for name in (s.name for s in first.stages)
            ),
            consumer_wait_s=self._sum("", "consumer_wait_s", step_s * stall),
            consumer_compute_s=self._sum("", "consumer_compute_s", step_s * (1 - stall)),
            elsewhere=_elsewhere(local, share),
            memory_used=max(s.memory_used for s in local),
            memory_limit=min(s.memory_limit for s in local) // share,
            cpu_quota=min(s.cpu_quota for s in local) / share,
            cores_idle_s=self._sum("", "cores_idle_s", gained("cores_idle_s") / share)
            if idle_is_known
            else None,
        )

    def _merge_stage(
        self, local: Sequence[StageStats], gains: Sequence[tuple[StageStats, StageStats]]
    ) -> StageStats:
        merged: dict[str, Any] = {key: max(getattr(s, key) for s in local) for key in _LARGEST}
        for key in _STAGE_SUMS:
            merged[key] = self._sum(local[0].name, key, _rise(gains, key) / self._ranks[self._host])
        return replace(local[0], **merged)

    def _sum(self, owner: str, name: str, gained: float) -> float:
        total = self._sums[owner, name] = self._sums.get((owner, name), 0.0) + gained
        return int(total) if name in _WHOLE else total


def _elsewhere(local: Sequence[Snapshot], ranks: int) -> dict[str, float]:
    """What workers elsewhere do for all ranks of this host, and for how many that is: each rank has workers of its
    own."""
    merged = {
        name: (max if name in _OF_A_WORKER else sum)(s.elsewhere.get(name, 0) for s in local)
        for name in local[0].elsewhere
    }
    return {**merged, "ranks": ranks} if merged else {}


def _rise(gains: Sequence[tuple[Any, Any]], name: str) -> float:
    """How much a counter rose over all ranks. One that fell belongs to a restarted rank, and begins anew."""
    return float(
        sum(max(0.0, getattr(later, name) - getattr(earlier, name)) for earlier, later in gains)
    )
