"""How a Spark session begins: shuffles as wide as the input needs, and a worker while the driver works."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import pytest

from sluice.etl.engines import opened
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.spark.session import fit_partitions, partitions_for


@pytest.mark.parametrize(
    ("mib", "cores", "partitions"), [(0, 2, 2), (25, 2, 2), (65, 2, 3), (12_500, 4, 391)]
)
def test_partitions_follow_the_input(mib, cores, partitions):
    assert partitions_for(mib * 2**20, cores) == partitions


@pytest.mark.parametrize("said", [True, False])
def test_what_a_user_says_of_partitions_stands(said):
    found: dict[str, str] = {}
    context = SimpleNamespace(
        getConf=lambda: SimpleNamespace(contains=lambda _key: said), defaultParallelism=2
    )
    fit_partitions(
        SimpleNamespace(sparkContext=context, conf=SimpleNamespace(set=found.__setitem__)),
        200 * 2**20,
    )
    assert found == ({} if said else {"spark.sql.shuffle.partitions": "7"})


@pytest.mark.parametrize(("master", "starts"), [("local[2]", True), ("spark://host:7077", False)])
def test_a_worker_starts_while_the_driver_works_but_not_on_a_cluster(monkeypatch, master, starts):
    """On a cluster without free cores it would never start, and no error could end the program."""
    met, done = threading.Barrier(2, timeout=60), []

    def foreach(_work):
        met.wait()
        done.append("started")

    context = SimpleNamespace(
        master=master, parallelize=lambda _rows, _parts: SimpleNamespace(foreach=foreach)
    )
    session = SimpleNamespace(sparkContext=context, stop=lambda: done.append("stopped"))
    monkeypatch.setattr("sluice.etl.spark.session.open_session", lambda _name: session)
    with opened("spark", (), JobProgress(io.StringIO())):
        if starts:
            met.wait()
    assert done == ["started", "stopped"][not starts :]
