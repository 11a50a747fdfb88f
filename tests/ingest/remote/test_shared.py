"""Loaders of one job that ask the same workers: each unit is made once, and no loader waits for a dead or slow one."""

from __future__ import annotations

import math
import threading

import pyarrow as pa
import pytest

from sluice.etl.table.table import FeatureTable
from sluice.ingest.loader import BatchLoader
from sluice.ingest.remote import asking
from sluice.ingest.remote.maker import UnitMaker
from sluice.ingest.remote.server import SharedUnits
from tests.ingest.remote.test_units import hashes

EMPTY = pa.record_batch({"x": []})


class Making:
    """Makes units of ten rows, and counts."""

    def __init__(self):
        self.made = []

    def __call__(self, unit):
        def make():
            self.made.append(unit)
            return pa.record_batch({"x": pa.array(range(10), pa.int64())}), unit.encode()

        return make


def taken(shared, loader, unit, making, kin="job 0/1"):
    return shared.get(kin, loader, unit, making(unit))[1].decode()


def known(shared, loaders, kin="job 0/1"):
    for loader in loaders:
        shared.get(kin, loader, f"of {loader} alone", lambda: (EMPTY, b""))
    shared._kept.clear()


def test_a_unit_is_made_once_for_all_loaders_and_dropped_after_the_last():
    shared, making = SharedUnits(2**20), Making()
    known(shared, "abc")
    for loader in "bca":
        assert taken(shared, loader, "u", making) == "u"
        assert shared.bytes == (0 if loader == "a" else 80)
    assert making.made == ["u"]
    taken(shared, "a", "u", making, kin="job 1/2")
    assert making.made == ["u", "u"], "another rank wants other rows"


def test_for_one_loader_alone_nothing_is_kept():
    shared, making = SharedUnits(2**20), Making()
    for _ in range(2):
        taken(shared, "a", "u", making)
        assert shared.bytes == 0
    assert making.made == ["u", "u"]


def test_who_dies_is_forgotten():
    now = [0.0]
    shared, making = SharedUnits(2**20, clock=lambda: now[0]), Making()
    known(shared, "ab")
    taken(shared, "b", "u", making)
    assert shared.bytes == 80, "for the one that may come back"
    now[0] = 31.0
    taken(shared, "b", "next", making)
    assert shared.bytes == 0
    assert shared._heard["job 0/1"].keys() == {"b"}


def test_who_lags_costs_no_more_than_the_limit_and_makes_its_own():
    shared, making = SharedUnits(2 * 80 + 1), Making()
    known(shared, "ab")
    for number in range(9):
        taken(shared, "a", f"u{number}", making)
        assert shared.bytes <= 160
    assert taken(shared, "b", "u0", making) == "u0"
    assert taken(shared, "b", "u8", making) == "u8"
    assert making.made == [*(f"u{n}" for n in range(9)), "u0"]


def test_two_loaders_at_once_get_one_unit_or_both_get_the_error_which_is_not_kept():
    shared, made, found, fails = SharedUnits(2**20), [], [], [True]

    def make():
        made.append(1)
        if fails:
            raise OSError("gone")
        return pa.record_batch({"x": [1]}), b"0"

    known(shared, "ab", "k")

    def get(loader):
        try:
            found.append(shared.get("k", loader, "u", make)[1])
        except OSError as error:
            found.append(str(error))

    def both():
        threads = [threading.Thread(target=get, args=(loader,)) for loader in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    both()
    assert found == ["gone"] * 2
    assert 1 <= len(made) <= 2
    assert shared.bytes == 0
    fails.clear()
    found.clear()
    made.clear()
    both()
    assert found == [b"0"] * 2
    assert made == [1]


@pytest.mark.parametrize("dies", [False, True])
def test_three_loaders_of_one_table_have_each_row_group_read_once(
    serve, named, table, dies, monkeypatch
):
    monkeypatch.setattr(
        asking, "_QUIET_S", 3600
    )  # on a busy machine a worker may look silent, and others are asked
    makers = []

    class Counting(UnitMaker):
        asked = 0

        def rows(self, unit):
            self.asked += 1
            return super().rows(unit)

    def open_job(job):
        makers.append(Counting(job, FeatureTable.open(table.uri)))
        return makers[-1]

    servers = [serve(open_job, threads=2) for _ in range(3)]
    expected, _ = hashes(table, 3, fill=0.0)
    with BatchLoader(table, batch_size=160, fill=0.0) as one:
        units = 3 * len(one.plan.schedule(0).reads)
    loaders = [
        BatchLoader(table, batch_size=160, read_ahead_epochs=3, fill=0.0, workers=named(*servers))
        for _ in range(3)
    ]
    found = {}
    for loader in loaders:
        loader._remote._fleet.slack = math.inf  # who is busy is asked all the same
        connection = loader._remote._fleet.workers[0].connection
        for server in servers:  # none is alone at first, for which nothing would be kept
            rank, name = connection._asker
            server._shared.get(
                f"{connection._job.digest} {rank}", name, f"of {name} alone", lambda: (EMPTY, b"")
            )

    def run(number):
        for epoch in range(3):
            for step, _ in enumerate(loaders[number]):
                if dies and number == 2 and (epoch, step) == (1, 3):
                    loaders[number].close()
                    return
        found[number] = loaders[number].order_hash

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for loader in loaders:
        loader.close()
    assert found == dict.fromkeys(range(3 - dies), expected[-1])
    made = sum(maker.asked for maker in makers)
    twice = sum(loader.remote["hedges"] + loader.remote["retries"] for loader in loaders)
    assert units <= made <= units + twice, (
        f"{made} units were made where {units} are wanted, {twice} asked for twice"
    )
