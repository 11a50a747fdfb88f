"""Lets one agent tune all ranks of a host. Ranks publish their snapshots, and each rank applies the agent's knobs.

They use a key-value store: a clone of torch's, with its own connection. Each rank has one key, and each host has one.
Every write replaces the old value. `check` comes before `get`, so nothing ever waits. Ranks may apply knobs at
different steps, because the order of rows does not depend on knobs.

    every rank           HostMember(store, host, local_rank, loader, tell=say).start()
    local rank 0 also has  Controller(HostTunable(store, host, loader, ranks={host: n, ...}), policy, ...)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from sluice.agent.runtime.ticker import Ticker
from sluice.agent.runtime_settings import RUNTIME
from sluice.agent.tunable import Tunable
from sluice.ingest.knobs import KnobError, Knobs, Limits
from sluice.ingest.stats import STAGE_COUNTERS, Snapshot, StageStats

_SUMS = ("batches", "rows", "cpu_used_s", "held_back", "held_back_pressure")
_LARGEST = ("workers", "queue_bytes", "queue_limit_bytes", "process_bytes", "starting")
_PER_WORKER = {"requests_a_core", "start_s"}
_WHOLE_NUMBERS = {
    "items",
    "rows",
    "bytes",
    "batches",
    "held_back",
    "held_back_pressure",
    "throttled",
    "restarts",
}


class RankStore(Protocol):
    """The methods of `torch.distributed.Store` that this module uses."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


def _snapshot_key(host: str, rank: int) -> str:
    return f"sluice/{host}/{rank}/snapshot"


def _knobs_key(host: str) -> str:
    return f"sluice/{host}/knobs"


def _get(store: RankStore, key: str) -> Any:
    """Returns the JSON value of a key. None if the key has none yet."""
    return json.loads(store.get(key)) if store.check([key]) else None


class HostMember:
    """The part of a rank: it publishes its snapshots and applies the host's knobs."""

    def __init__(
        self,
        store: RankStore,
        host: str,
        local_rank: int,
        tunable: Tunable,
        *,
        tell: Callable[[str], None],
        interval_s: float = RUNTIME.publish_s,
    ) -> None:
        """`tell` gets a sentence if this rank cannot follow the agent. The same sentence comes once."""
        self._store = store
        self._tell = tell
        self._told: set[str] = set()
        self._tunable = tunable
        self._snapshot_key = _snapshot_key(host, local_rank)
        self._knobs_key = _knobs_key(host)
        self._applied = 0
        self.interval_s = interval_s
        self._ended = False
        """Whether a step has failed. Training goes on with the knobs as they are."""
        self._ticker = Ticker("sluice-member", lambda: self.interval_s, self._safe_step)

    def step(self) -> None:
        """Publishes one snapshot, and applies the host's knobs if they are new."""
        self._store.set(self._snapshot_key, json.dumps(self._tunable.snapshot().to_dict()))
        published = _get(self._store, self._knobs_key)
        if published is not None and published["number"] > self._applied:
            self._applied = published["number"]
            knobs = Knobs.from_dict(published["knobs"])
            try:
                self._tunable.apply(knobs)
            except KnobError as error:  # This rank's limits have changed.
                self._tell_once(f"this rank cannot apply all of the agent's knobs: {error}")
                self._tunable.apply(self._tunable.limits.clamp(knobs))

    def start(self) -> HostMember:
        """Runs steps in a separate thread until `stop()`."""
        self._ticker.start()
        return self

    def _safe_step(self) -> bool:
        try:
            self.step()
        except Exception as error:  # A closed store or pipeline must never disturb the trainer.
            self._ended = True
            self._tell_once(
                "the agent no longer reaches this rank, which goes on with its knobs: "
                f"{type(error).__name__}: {error}"
            )
            return False
        return True

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def stop(self) -> None:
        """Ends the thread and publishes a last snapshot. May be called twice."""
        self._ticker.stop()
        if not self._ended:
            with suppress(Exception):  # The store may end with the run.
                self.step()

    def __enter__(self) -> HostMember:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class HostTunable:
    """Shows the host's ranks as one pipeline: the mean rank, with the same knobs for all.

    A rank's snapshot has the host's core quota, and the memory limit of that rank alone. Here the quota is divided by
    the number of ranks that share it. The stall is the largest of the host's ranks, and `longest_wait_s` shows the
    largest of any rank on any host. At each step all ranks wait for the slowest one. The others then look bound by
    their trainer, although they wait for another rank's input. So the agent adds workers only where a rank of this
    host stalls, and gives cores back only if no rank of any host does."""

    def __init__(
        self, store: RankStore, host: str, tunable: Tunable, *, ranks: Mapping[str, int]
    ) -> None:
        """`tunable` is that of local rank 0. `ranks` maps each host to its number of ranks."""
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
        # (stage or "", name) → the merged counter before it is rounded.
        self._sums: dict[tuple[str, str], float] = {}

    @property
    def limits(self) -> Limits:
        return self._tunable.limits

    @property
    def knobs(self) -> Knobs:
        return self._knobs

    def apply(self, knobs: Knobs) -> None:
        knobs = self.limits.check(knobs)
        self._number += 1
        self._store.set(
            _knobs_key(self._host), json.dumps({"number": self._number, "knobs": knobs.to_dict()})
        )
        self._knobs = knobs

    def snapshot(self) -> Snapshot:
        """Returns the merged snapshot. It stays the same until a local rank publishes a new one."""
        pairs = self._collect()
        local = [s for (host, _), s in self._latest.items() if host == self._host]
        local_pairs = [pair for (host, _), pair in pairs.items() if host == self._host]
        if self._merged is not None and not local_pairs:
            return self._merged
        self._merged = self._merge(local or [self._tunable.snapshot()], local_pairs)
        return self._merged

    def _collect(self) -> dict[tuple[str, int], tuple[Snapshot, Snapshot]]:
        """Returns (previous snapshot, new one) for each (host, rank) that has published a new snapshot.

        It also updates each rank's stall."""
        pairs = {}
        for host, count in self._ranks.items():
            for rank in range(count):
                published = _get(self._store, _snapshot_key(host, rank))
                if published is None:
                    continue
                latest = Snapshot.from_dict(published)
                previous = self._latest.get((host, rank))
                self._latest[host, rank] = latest
                if previous is None or latest.sequence < previous.sequence:
                    continue  # The first snapshot of a rank, or of a restarted rank, has none before it.
                if latest.sequence > previous.sequence:
                    pairs[host, rank] = (previous, latest)
                    wait = latest.consumer_wait_s - previous.consumer_wait_s
                    total = wait + latest.consumer_compute_s - previous.consumer_compute_s
                    if total > 0:
                        self._stalls[host, rank] = min(max(wait / total, 0.0), 1.0)
        return pairs

    def _merge(
        self, local: Sequence[Snapshot], pairs: Sequence[tuple[Snapshot, Snapshot]]
    ) -> Snapshot:
        """Returns the merged snapshot of the local ranks.

        Counters grow by the mean of the ranks. Other values are the largest of any rank, or a rank's share."""
        ranks = self._ranks[self._host]
        first = local[0]

        def mean_rise(name: str) -> float:
            return _rise(pairs, name) / ranks

        step_s = mean_rise("consumer_wait_s") + mean_rise("consumer_compute_s")
        stall = max((s for (host, _), s in self._stalls.items() if host == self._host), default=0.0)
        longest = max(self._stalls.values(), default=0.0)
        counters: dict[str, Any] = {
            name: self._sum("", name, mean_rise(name)) for name in ("at", *_SUMS)
        }
        # These are the sum of all ranks, because a mean would be a fraction of a restart.
        for name in ("throttled", "restarts"):
            counters[name] = self._sum("", name, _rise(pairs, name))
        # Each rank has its own remote workers.
        remote = {
            name: (max if name in _PER_WORKER else sum)(s.elsewhere.get(name, 0) for s in local)
            for name in first.elsewhere
        }
        idle_is_known = all(s.cores_idle_s is not None for s in (first, *itertools.chain(*pairs)))
        return replace(
            first,
            **counters,
            sequence=self._merged.sequence + 1 if self._merged else 0,
            stages=tuple(
                self._merge_stage(
                    [s.stage(name) for s in local],
                    [(earlier.stage(name), later.stage(name)) for earlier, later in pairs],
                )
                for name in (s.name for s in first.stages)
            ),
            consumer_wait_s=self._sum("", "consumer_wait_s", step_s * stall),
            consumer_compute_s=self._sum("", "consumer_compute_s", step_s * (1 - stall)),
            longest_wait_s=self._sum("", "longest_wait_s", step_s * longest),
            lock_held_s=self._sum("", "lock_held_s", mean_rise("lock_held_s")),
            elsewhere={**remote, "ranks": ranks} if remote else {},
            memory_used=max(s.memory_used for s in local),
            memory_limit=min(s.memory_limit for s in local),
            memory_free=min(s.memory_free for s in local),
            cpu_quota=min(s.cpu_quota for s in local) / ranks,
            cores_idle_s=self._sum("", "cores_idle_s", mean_rise("cores_idle_s") / ranks)
            if idle_is_known
            else None,
        )

    def _merge_stage(
        self, local: Sequence[StageStats], pairs: Sequence[tuple[StageStats, StageStats]]
    ) -> StageStats:
        merged: dict[str, Any] = {key: max(getattr(s, key) for s in local) for key in _LARGEST}
        for key in STAGE_COUNTERS:
            merged[key] = self._sum(local[0].name, key, _rise(pairs, key) / self._ranks[self._host])
        return replace(local[0], **merged)

    def _sum(self, owner: str, name: str, rise: float) -> float:
        """Adds a rise to a merged counter of a stage, or of the pipeline if `owner` is empty. Returns the counter."""
        total = self._sums[owner, name] = self._sums.get((owner, name), 0.0) + rise
        return int(total) if name in _WHOLE_NUMBERS else total


def _rise(pairs: Sequence[tuple[Any, Any]], name: str) -> float:
    """Returns how much a counter rose over all ranks. A counter that fell belongs to a restarted rank and adds 0."""
    return float(
        sum(
            max(0.0, (getattr(later, name) or 0) - (getattr(earlier, name) or 0))
            for earlier, later in pairs
        )
    )
