"""One agent for the ranks of a host, over a store in memory."""

from __future__ import annotations

import dataclasses

import pytest

from tests.agent.fake import controlled, store_bound
from tests.product import HostMember, HostTunable, KnobError
from tests.raises import raises


class MemoryStore:
    """Refuses what would block: a `get` of a key that is not there."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        assert key in self.values, f"get of {key!r} would wait"
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


def untold(text: str) -> None:
    """Fails, because nothing may keep a rank from the agent here."""
    raise AssertionError(text)


def _pipeline(**more):
    return store_bound(cores=8, **more)


def _advance(pipelines, members, seconds=1.0):
    for pipeline in pipelines:
        pipeline.advance(seconds)
    for member in members:
        member.step()


def _saying(**values):
    """A pipeline whose snapshots have these values."""
    pipeline = _pipeline()
    pipeline.told = values
    return pipeline


def _host(*pipelines):
    """The members of a host, and what its agent sees of them."""
    store = MemoryStore()
    members = [HostMember(store, "a", rank, p, tell=untold) for rank, p in enumerate(pipelines)]
    return members, HostTunable(store, "a", pipelines[0], ranks={"a": len(pipelines)})


FLEET = {"workers": 3, "bytes": 7, "requests_a_core": 2, "start_s": 5.0}


@pytest.mark.parametrize(
    ("name", "values", "merged"),
    [
        ("elsewhere", (FLEET, FLEET), FLEET | {"workers": 6, "bytes": 14, "ranks": 2}),
        ("memory_free", (100, 40), 40),
        ("memory_limit", (2**33, 2**32), 2**32),
        ("cores_idle_s", (3.0, None), None),
    ],
)
def test_what_ranks_say_is_merged(name, values, merged):
    pipelines = [_saying(**{name: value}) for value in values]
    members, tunable = _host(*pipelines)
    for _ in range(2):
        _advance(pipelines, members)
        said = getattr(tunable.snapshot(), name)
    assert said == merged


@pytest.mark.parametrize(
    ("name", "added", "merged"),
    [("restarts", (1, 2), 3), ("throttled", (1, 2), 3), ("cores_idle_s", (30.0, 30.0), 15.0)],
)
def test_worker_processes_that_died_are_counted_over_all_ranks(name, added, merged):
    """And the idle cores of the host are shared by its ranks."""
    pipelines = [_saying(**{name: 0}) for _ in added]
    members, tunable = _host(*pipelines)
    _advance(pipelines, members)
    before = getattr(tunable.snapshot(), name)
    for pipeline, more in zip(pipelines, added, strict=True):
        pipeline.told = {name: more}
    _advance(pipelines, members, 10.0)
    assert getattr(tunable.snapshot(), name) - before == pytest.approx(merged)


def test_ranks_are_seen_as_one_and_all_get_the_knobs():
    pipelines = [_pipeline(), _pipeline()]
    members, tunable = _host(*pipelines)
    assert tunable.snapshot().rows == 0  # nobody has published yet, and nothing waits for it
    _advance(pipelines, members)
    tunable.snapshot()
    _advance(pipelines, members, 10.0)
    merged, each = tunable.snapshot(), pipelines[0].snapshot()
    assert merged.at == pytest.approx(10.0)
    assert merged.rows == pytest.approx(each.rows, rel=0.15)
    assert merged.stage("decode").busy_s == pytest.approx(10.0, rel=0.01)
    assert merged.cpu_quota == 4.0  # two ranks share the host's eight
    assert merged.memory_limit == each.memory_limit  # it is that of one rank's loader
    assert tunable.snapshot() is merged  # no news

    tunable.apply(tunable.knobs.with_workers(decode=5))
    _advance(pipelines, members)
    assert [p.knobs.workers["decode"] for p in pipelines] == [5, 5]
    _advance(pipelines, members)
    assert [len(p.applied) for p in pipelines] == [1, 1]  # applied once, not at every look
    with raises(KnobError, "outside"):
        tunable.apply(tunable.knobs.with_workers(decode=500))


@pytest.mark.parametrize("workers", [(8, 4), (1, 1)])
def test_a_stalled_rank_on_another_host_keeps_the_workers_here(workers):
    """This host's ranks look bound by their trainer, while they wait in the all-to-all for a slow one elsewhere."""
    workers = dict(zip(("decode", "collate"), workers, strict=True))
    for elsewhere, kept in ((_pipeline(), True), (_pipeline(step_s=0.1, wait_s=0.001), False)):
        store = MemoryStore()
        here = _pipeline(step_s=0.1, workers=workers)
        pipelines = [here, elsewhere]
        members = [
            HostMember(store, "a", 0, here, tell=untold),
            HostMember(store, "b", 0, elsewhere, tell=untold),
        ]
        tunable = HostTunable(store, "a", here, ranks={"a": 1, "b": 1})
        controller, _ = controlled(tunable, clock=lambda here=here: here.now)
        for _ in range(30):
            _advance(pipelines, members)
            controller.step()
        assert controller.frozen is None
        assert (here.knobs.workers == workers) is (kept or workers["decode"] == 1), here.knobs
        seen = tunable.snapshot()
        assert (seen.longest_wait_s > 9 * seen.consumer_wait_s) is kept


def test_counters_never_fall_when_a_rank_comes_late_or_starts_again():
    pipelines = [_pipeline(), _pipeline()]
    members, tunable = _host(*pipelines)
    seen = []
    for tick in range(12):
        for rank in (0, 1) if tick > 4 else (0,):
            pipelines[rank].advance(1.0)
            members[rank].step()
        if tick == 8:  # the new rank has been looked at more often than the one before it
            pipelines[1] = _pipeline()
            pipelines[1]._sequence = 99
            members[1] = HostMember(tunable._store, "a", 1, pipelines[1], tell=untold)
        seen.append(tunable.snapshot())
    for field in ("at", "rows", "cpu_used_s", "consumer_wait_s", "sequence"):
        values = [getattr(s, field) for s in seen]
        assert values == sorted(values), field


def test_a_store_that_is_gone_stops_the_member_and_nothing_else():
    class Gone(MemoryStore):
        def set(self, key, value):
            raise ConnectionError("the store is gone")

    told: list[str] = []
    with HostMember(Gone(), "a", 0, _pipeline(), interval_s=0.001, tell=told.append) as member:
        member._ticker._thread.join(60)
    assert len(told) == 1
    assert "ConnectionError: the store is gone" in told[0]


def test_a_rank_whose_limits_moved_says_so_once_and_goes_on():
    store, pipeline, told = MemoryStore(), _pipeline(), []
    member = HostMember(store, "a", 0, pipeline, tell=told.append)
    tunable = HostTunable(store, "a", _pipeline(), ranks={"a": 1})
    tunable.apply(pipeline.knobs.with_workers(decode=9))
    pipeline.stages[0] = dataclasses.replace(pipeline.stages[0], most=4)
    member.step()
    tunable.apply(pipeline.knobs.with_workers(decode=9))
    member.step()
    assert len(told) == 1
    assert "9 is outside 1 to 4" in told[0]
    assert pipeline.knobs.workers["decode"] == 4
    tunable.apply(pipeline.knobs.with_workers(decode=3))
    member.step()
    assert (len(told), pipeline.knobs.workers["decode"]) == (1, 3)


def test_a_run_that_ends_before_the_second_tick_has_been_measured():
    store, pipeline, seen = MemoryStore(), _pipeline(), []
    member = HostMember(store, "a", 0, pipeline, interval_s=1e6, tell=untold)
    member.step()
    tunable = HostTunable(store, "a", pipeline, ranks={"a": 1})
    controller, _ = controlled(tunable, "fixed", observe=seen.append, clock=lambda: pipeline.now)
    controller.step()
    pipeline.advance(0.5)
    assert not seen
    member.stop()
    controller.stop()
    controller.stop()
    assert [line["rows"] for line in seen] == [pipeline.snapshot().rows]
    assert seen[0]["rows_per_s"] > 0
