"""Transforms that remote workers run: the same rows and errors as here, and no function that differs there."""

import contextlib
import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from sluice import Errors, Knobs, Transform
from sluice.ingest.remote import calls, client, messages
from sluice.ingest.remote.calls import request_call
from sluice.ingest.remote.messages import RemoteError, WrongAnswer, decode, encode
from tests.etl.tables import write_rows
from tests.ingest.remote.conftest import TOKEN, answering
from tests.ingest.remote.test_units import hashes, same
from tests.open_loader import open_loader
from tests.product import (
    Connection,
    FunctionError,
    Functions,
    Permission,
    QuarantineError,
    TransformError,
    source_digest,
)
from tests.raises import raises

HERE = "tests.ingest.remote.functions"
ALLOWED = Permission(modules=frozenset([HERE]))
REMOTE = Knobs(workers={"mine": 2}, backend={"mine": "remote"})


@pytest.fixture
def calling(serving):
    """A function that makes a worker which may call these tests' functions."""
    return partial(serving, permission=ALLOWED)


def mine(function, **how):
    return {"transforms": [Transform(f"{HERE}:{function}", "mine", **how)], "fill": 0.0}


def test_a_remote_transform_gives_the_same_batches_also_if_it_changes_its_back_end_while_it_runs(
    calling, named, table
):
    server = calling()
    expected = hashes(table, **mine("halved"))
    same(hashes(table, **mine("halved"), workers=named(server), knobs=REMOTE), expected)
    assert any(
        (batch[3] != other[3]).any()
        for batch, other in zip(expected[1], hashes(table, fill=0.0)[1], strict=True)
    )
    hashes_seen, turns = [], itertools.cycle(["process", "thread", "remote"])
    with open_loader(
        table, batch_size=160, epochs=2, **mine("halved"), workers=named(server), knobs=REMOTE
    ) as loader:
        assert loader.limits.backends_of("mine") == ("thread", "process", "remote")
        for _ in range(2):
            for step, _batch in enumerate(loader):
                if step % 7 == 0:
                    loader.apply(
                        Knobs(workers={"mine": 1 + step % 3}, backend={"mine": next(turns)})
                    )
            hashes_seen.append(loader.order_hash)
        assert loader.remote["calls"] > 0
    assert hashes_seen == expected[0]


def test_a_function_that_is_not_allowed_or_another_one_is_refused_by_name(
    calling, named, table, monkeypatch, tmp_path
):
    how = mine("halved") | {
        "knobs": REMOTE,
        "errors": Errors(on_error="quarantine", quarantine=tmp_path / "rows"),
    }
    with raises(RemoteError, "worker 127.0.0.1", f"{HERE}:halved", f"--allow-code {HERE}"):
        hashes(table, **how, workers=named(calling(permission=Permission())))
    hashes(table, **how, workers=named(calling()))
    with monkeypatch.context() as patched:
        others = map(str, itertools.count())
        patched.setattr(calls, "source_digest", lambda _: next(others))
        with raises(RemoteError, "worker 127.0.0.1", f"{HERE}:halved", "another source"):
            hashes(table, **how, workers=named(calling()))
    monkeypatch.setattr(
        client,
        "request_call",
        lambda *given: replace(request_call(*given), body=of_version("0.0.1")),
    )
    with raises(RemoteError, "worker 127.0.0.1", "sluice", "0.0.1"):
        hashes(table, **how, workers=named(calling()))
    assert not (tmp_path / "rows").exists(), "no row is to blame"


def of_version(version):
    """A request that another version of sluice has encoded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(messages, "package", lambda: version)
        return encode({"function": "", "source": ""}, {})


def test_a_hash_covers_the_module_of_a_function_and_what_has_no_source_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    digests = []
    for number, constant in enumerate((1, 2, 1)):
        (tmp_path / f"own{number}.py").write_text(
            f"CONSTANT = {constant}\ndef own(columns):\n    return CONSTANT\n"
        )
        digests.append(source_digest(f"own{number}:own"))
    assert digests[0] == digests[2] != digests[1]
    with raises(RemoteError, "math:sqrt", "source"):
        source_digest("math:sqrt")


def test_rows_that_fail_there_are_quarantined_as_here_and_errors_name_the_batch(
    calling, named, table, tmp_path
):
    errors = {
        name: Errors(on_error="quarantine", quarantine=tmp_path / name)
        for name in ("here", "there")
    }
    server = calling()
    same(
        hashes(
            table, 1, **mine("picky"), errors=errors["there"], workers=named(server), knobs=REMOTE
        ),
        hashes(table, 1, **mine("picky"), errors=errors["here"]),
    )
    listed = [
        sorted(
            (row["file"], row["row_group"], str(row["row"]))
            for row in map(json.loads, (tmp_path / name).read_text().splitlines())
        )
        for name in ("here", "there")
    ]
    assert listed[0] == listed[1] != []
    for function, error, facts in (
        ("short", TransformError, ("'I1'", "(159,)", "(160,)")),
        ("greedy", QuarantineError, ("all of it",)),
    ):
        with raises(error, "'mine'", *facts):
            hashes(table, **mine(function), workers=named(server), knobs=REMOTE)


def test_functions_over_rows_run_there_as_here_and_the_same_rows_are_quarantined(
    calling, named, tmp_path
):
    texts = ["a" * (n % 50) + "!" * (n == 1234) for n in range(4000)]
    path = str(tmp_path / "a.parquet")
    write_rows(path, row_group_size=900, label=[0, 1] * 2000, query=texts)
    lengths = Transform(f"{HERE}:length", "mine", reads=["query"], gives={"length": "float32"})
    outcomes = []
    for name, more in (("here", {}), ("there", {"workers": named(calling()), "knobs": REMOTE})):
        with open_loader(
            [path],
            batch_size=160,
            roles={"label": "label", "dense": "length"},
            transforms=[lengths],
            errors=Errors(on_error="quarantine", quarantine=tmp_path / name),
            **more,
        ) as loader:
            batches = [(batch.dense.tolist(), batch.weight.tolist()) for batch in loader]
            outcomes.append((batches, loader.order_hash, loader.quarantined["rows_set_aside"]))
    assert loader.remote["calls"] > 0
    assert loader.remote["units"] == 0, "rows are read here"
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] == 1


@pytest.mark.parametrize(
    ("lie", "fact"),
    [
        (lambda old, own: [old], "another request"),
        (lambda old, own: [own, own], "1"),
        (lambda old, own: [encode({**decode(own)[0], "error": "no"}, {})], "trace"),
        (lambda old, own: [encode({**decode(own)[0], "error": {}}, {})], "kinds"),
    ],
)
def test_an_answer_to_another_call_or_of_another_form_is_none_and_names_its_worker(
    calling, named, table, lie, fact
):
    answers = []

    def lied(own):
        answers.extend(own)
        return iter(lie(*answers) if len(answers) == 2 else answers)

    server = calling(answering("call", lied))
    connection = Connection(server.address, TOKEN)

    def call(value):
        arrays = {"I1": np.full(3, value, np.float32), "C1": np.arange(3)}
        return connection.ask(request_call(f"{HERE}:halved", arrays, "step 7"), 60)

    call(1.0)
    with raises(WrongAnswer, f"worker {server.address}", fact):
        call(2.0)
    connection.close()


def test_what_was_packed_comes_back_and_anything_else_is_found():
    arrays = {
        "a": np.arange(7, dtype=np.float32),
        "none": np.empty(0, np.int32),
        "wide": np.arange(12).reshape(3, 4),
        "day": np.array(["2026-11-22"], "M8[D]"),
    }
    body = encode({"function": "x"}, arrays)
    head, decoded = decode(body)
    assert head["function"] == "x"
    assert decoded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(decoded[name], array, strict=True)
    data = body.to_pybytes()
    for at in range(0, len(data), 3):
        with pytest.raises(WrongAnswer):
            decode(pa.py_buffer(data[:at]))
        flipped = bytearray(data)
        flipped[at] ^= 4
        with contextlib.suppress(WrongAnswer):
            decode(pa.py_buffer(bytes(flipped)))
            assert at >= len(data) - 100, "this names the function, which is looked up"
    for junk in (b"", b"\0" * 40, b"{}" + (2).to_bytes(4, "little"), b"\xff" * 99):
        with pytest.raises(WrongAnswer):
            decode(pa.py_buffer(junk))


def test_an_error_of_any_kind_crosses_with_its_batch():
    def call(name):
        request = request_call(f"{HERE}:{name}", {"I1": np.ones(3)}, "step 7")
        answer = messages.answer(request.body, Functions(ALLOWED).call)
        return request.result(*messages.read_answer(answer, request.body))

    with raises(FunctionError, "step 7", "TypeError", "not a dict"):
        call("numbered")
    assert call("put_in_place")["I1"].tolist() == [2, 2, 2]
