"""Operators are applied by the job or by the loader, as the spec says, and the rows that come out are the same."""

import pyarrow as pa
import pytest

from sluice import FeatureTable, Order
from sluice.common.settings import parse
from sluice.etl.apply.features import typed
from sluice.etl.job_request import JobRequest
from sluice.etl.spec.columns import ColumnSpec
from sluice.etl.table.commit import CommitError
from tests.etl.jobs import Said
from tests.etl.tables import column, write_spec
from tests.product import BatchLoader, JobProgress, Spec, synthesize


def spec_text(online: str = "") -> str:
    """A spec whose operators are applied by the job, or by the loader with `, online = true`."""
    return write_spec(
        "label:int I1..I13:int C1..C26:text",
        column("I*", "dense", f"fill, value = 0; clip, low = -2{online}; log, shift = 3{online}"),
        column("C*", "sparse", f"categorify, min_count = 4{online}"),
        column("C12", "sparse", f"hash, size = 1000{online}"),
        column("pair", "sparse", "cross, size = 1000", ["C1", "C2"]),
        form="tsv",
        table="split = {train = 0.8, test = 0.2}",
    )


SPEC, LEFT = spec_text(), spec_text(", online = true")


def answer(tmp_path, words: str, *, text: str = SPEC, said: Said | None = None) -> dict:
    (tmp_path / "spec.toml").write_text(text)
    argv = f"--spec {tmp_path}/spec.toml --input {tmp_path}/log --engine local {words}".split()
    request = parse(JobRequest, argv=argv, prog="sluice etl")
    return request.answer(JobProgress(said or Said()), argv)


def test_every_option_of_a_job_arrives(tmp_path, monkeypatch):
    monkeypatch.setattr("sluice.etl.jobs.job.Job", dict)
    (tmp_path / "spec.toml").write_text(SPEC)
    choices = {"mode": "overwrite", "rejects": "r", "max_rejects": 0.5, "accept_nulls": ("C1",)}
    choices |= dict.fromkeys(("reuse_state", "update_state", "refit"), True)
    choices |= {"late": "reject", "split_moved": "accept"}
    files = {"spec": str(tmp_path / "spec.toml"), "input": ("a", "b"), "output": str(tmp_path)}
    job = JobRequest(**files, worker_memory=64, **choices).job()
    assert (job.pop("spec").columns, job.pop("store").uri) == (
        Spec.parse(SPEC).columns,
        str(tmp_path),
    )
    assert job == {**choices, "inputs": ("a", "b"), "worker_bytes": 2**26}


def test_a_table_whose_operators_are_left_to_the_loader_gives_the_same_batches(tmp_path):
    synthesize(tmp_path / "log", rows=3000, seed=2)
    answer(tmp_path, f"--output {tmp_path}/etl")
    answer(tmp_path, f"--output {tmp_path}/left", text=LEFT)
    assert sum(bool(field.online) for field in FeatureTable.open(tmp_path / "left").fields) == 39
    outcomes = []
    for name in ("etl", "left"):
        with BatchLoader(
            FeatureTable.open(tmp_path / name),
            batch_size=160,
            order=Order(last="pad"),
        ) as loader:
            rows = sum(batch.rows for batch in loader)
            outcomes.append((rows, loader.order_hash, loader.cardinalities))
    assert outcomes[0] == outcomes[1]


def test_an_append_of_other_columns_is_refused_before_it_starts(tmp_path):
    synthesize(tmp_path / "log", rows=300, seed=2)
    answer(tmp_path, f"--output {tmp_path}/t")
    more = SPEC + column("I2", "dense", "fill, value = 0")
    more += column("more", "dense", "fill, value = 1", "I2")
    said = Said()
    with pytest.raises(
        CommitError,
        match=r"cannot append, .*column 'more' is not in the table.*"
        "--mode overwrite --update-state with all of the input",
    ):
        answer(tmp_path, f"--output {tmp_path}/t --mode append", text=more, said=said)
    assert not said.text


@pytest.mark.parametrize(("kind", "nest"), [("double", False), ("list<double>", True)])
def test_whole_numbers_that_a_loader_gets_become_the_nearest_double(kind, nest):
    """Alone and in lists, also above 2**53, where not every whole number is a double."""
    whole = [0, -7, 2**53 + 1, -(2**63) + 1, 2**63 - 1]
    values = pa.array([[n] for n in whole] if nest else whole)
    column = ColumnSpec(
        name="x", sources=("x",), role="id_list" if nest else "dense", raw=True, left_as=kind
    )
    made = typed(values, column).to_pylist()
    assert made == [[float(n)] if nest else float(n) for n in whole]
