"""A trained run served: features and probabilities as in training, and requests that are not as they should be."""

import asyncio
import json
import pickle  # noqa: TID251  it makes what must not be read
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pyarrow as pa
import pytest
import torch
from torchrec import KeyedJaggedTensor

from sluice.dlrm.serving import batcher, served_model, server
from sluice.dlrm.serving.http import iso_time
from sluice.dlrm.serving.server import take_newer
from sluice.dlrm.training import assemble, loaders
from tests.dlrm import clicks_table
from tests.dlrm.rig import Bomb, meta_of, torchrec_warns
from tests.dlrm.rig import written as rewritten
from tests.dlrm.serving.conftest import ROWS
from tests.dlrm.serving.stub import assert_same_features, body_of, decoded, talk_to
from tests.e2e.test_readme import blocks
from tests.product import (
    Checkpoint,
    CheckpointError,
    Config,
    Decoder,
    Footprint,
    HttpApp,
    Refusal,
    Scorer,
    Servable,
    ServedTables,
    ServerLimits,
    Spec,
    latest,
    machine,
    mark_best,
    world,
)
from tests.raises import assert_names, raises
from tests.run_program import last_json

pytestmark = pytest.mark.slow

JSON = "application/json"


@pytest.fixture
def run(folder, tmp_path) -> Path:
    """A copy of the run, which a test may change."""
    return shutil.copytree(folder / "run", tmp_path / "run")


@pytest.fixture(scope="module")
def wide(folder) -> Servable:
    return Servable.load(folder / "run")


@pytest.fixture(scope="module")
def raw() -> pa.Table:
    return clicks_table.raw_rows(ROWS)


@pytest.fixture
def scorer(wide) -> Scorer:
    return Scorer(wide, most_rows=10_000)


def as_json(table: pa.Table) -> bytes:
    return body_of(*table.to_pylist())


# ---- the same as in training


@torchrec_warns
def test_features_and_probabilities_are_those_of_training(folder, wide, scorer, raw):
    """Against the loader's batches and the model as the trainer's own code loads it."""
    config, features = Config.from_dict(wide.meta.config), raw.drop_columns("label")
    wanted: list[float] = []
    with world() as here:
        now = Footprint.of(config, wide.table, machine(1, 1))
        parts = assemble.parts_of(config, now.layout, len(wide.meta.dense), now.placement, here)
        Checkpoint(wide.path).load(parts, here, optimisers=False)
        for split in ("train", "validation"):
            with (
                loaders.evaluation(config, wide.table, split, rank=0, local_ranks=1) as batches,
                torch.no_grad(),
            ):
                for batch in batches:
                    if not batch.weight.all():  # the last one has rows that fill it up
                        continue
                    asked = features.take(clicks_table.numbers_of(batch.dense[:, 0]))
                    made = wide.batch(clicks_table.columns_of(asked), {})
                    assert_same_features(made, batch)
                    want = parts.model(*parts.layout.features(batch)).double().sigmoid().numpy()
                    (answer,) = scorer.answer([as_json(asked)])
                    assert np.abs(np.array(answer.probabilities) - want).max() < 1e-6
                    wanted += want.tolist()
    assert len(wanted) > 2500
    assert np.std(wanted) > 0.02  # or everything would be equal to everything


def test_a_request_brings_what_joins_and_histories_go_by_and_not_what_they_make():
    spec = Spec.parse(f"""{clicks_table.spec_text(columns={**clicks_table.COLUMNS, "user": "int", "at": "int"})}
[[join]]
path = "users.parquet"
on = ["user"]
columns = ["age:int"]
[[history]]
name = "before"
of = "C1"
by = "user"
order = "at"
length = 3
[[column]]
name = "before"
role = "id_list"
ops = [{{op = "hash", size = 9}}]
[[column]]
name = "age"
role = "dense"
ops = [{{op = "fill", value = 0}}]
""")
    decoder = Decoder(spec, "", most_rows=9)
    assert set(decoder.kinds) == {*clicks_table.COLUMNS, "user", "at"} - {"label"}
    assert len(decoded(decoder, b'{"rows": [{"user": 3, "at": 5}]}')["user"]) == 1
    with raises(Refusal, "'age'"):
        decoded(decoder, b'{"rows": [{"age": 3}]}')


def test_a_feature_that_is_missing_is_the_specs_default_and_counted(scorer):
    given = {
        "I1": None,
        "I2": 5,
        "I5": 2.5,
        "number": 3,
        "C1": "zzz",
        "C5": None,
        "C9": "x",
        "C14": None,
        "tags": [],
    }
    fewer = {name: value for name, value in given.items() if name not in ("C14", "I1")}
    whole, lacking = scorer.answer([body_of(row) for row in (given, fewer)])
    assert lacking.probabilities == pytest.approx(whole.probabilities, abs=1e-6)
    assert scorer.missing == {"C14": 2, "I1": 2, "C5": 2}


def test_a_number_that_nothing_fills_in_is_refused(wide, raw):
    columns = clicks_table.columns_of(raw.slice(0, 3).drop_columns("label"))
    made = wide.features.inputs(columns) | {"I1": pa.array([1.0, None, 2.0], pa.float32())}
    bare = replace(wide, features=SimpleNamespace(inputs=lambda _: made))
    bare.batch(columns, problems := {})
    assert list(problems) == [1]
    assert_names(problems[1], "'I1'", "missing")


# ---- tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bags_are_the_sums_of_the_rows_that_were_trained(dtype):
    weights = {name: torch.randn(n, 8).to(dtype) for name, n in {"a": 50, "b": 7, "c": 9}.items()}
    tables = ServedTables(weights, {name: [name] for name in weights})
    assert tables.bytes == 66 * 8 * dtype.itemsize
    sparse = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.tensor([3, 49, 0, 0, 6], dtype=torch.int32),
        lengths=torch.tensor([2, 2, 0, 1, 0, 0], dtype=torch.int32),
    )
    pooled = tables(sparse)
    rows = {name: table.float() for name, table in weights.items()}
    assert torch.equal(pooled["a"], torch.stack([rows["a"][3] + rows["a"][49], 2 * rows["a"][0]]))
    assert torch.equal(pooled["b"], torch.stack([torch.zeros(8), rows["b"][6]]))
    assert torch.equal(pooled["c"], torch.zeros(2, 8))


# ---- over HTTP, without a socket


def served(scorer: Scorer, talk, wall_clock=time.time, **limits):
    """What `talk(client, service)` returns."""

    limited = ServerLimits(max_rows=10_000, **limits)
    service = HttpApp(scorer, limited, wall_clock=wall_clock)
    return talk_to(service, lambda http: talk(http, service))


def post(http: httpx.AsyncClient, body: bytes):
    return http.post("/predict", content=body, headers={"content-type": JSON})


def loading(run: Path, **how: Any):
    """Returns a function that loads the run's model."""
    return lambda: Scorer(Servable.load(run, **how), most_rows=10_000)


def test_http_answers_and_counts(scorer):
    async def talk(http, service):
        asked = [await post(http, body) for body in (b'{"rows": [{}, {}, {}]}', b"?")]
        return asked + [
            await http.get(f"/{path}") for path in ("modle", "model", "health", "metrics")
        ]

    good, bad, nowhere, model, health, metrics = served(scorer, talk)
    assert (good.status_code, len(good.json()["probabilities"])) == (200, 3)
    assert good.json()["step"] == 38
    assert (bad.status_code, list(bad.json())) == (400, ["error"])
    assert "did you mean '/model'" in nowhere.json()["error"]
    assert model.json()["features"]["tags"] == "texts"
    assert "label" not in model.json()["features"]
    assert health.json()["ok"]
    assert 'sluice_serve_requests_total{status="200"} 1.0' in metrics.text
    assert 'sluice_serve_requests_total{status="400"} 1.0' in metrics.text
    assert "sluice_serve_rows_total 3.0" in metrics.text
    assert 'sluice_serve_missing_features_total{feature="I1"} 3.0' in metrics.text
    assert "sluice_serve_model_step 38.0" in metrics.text


def test_no_answer_mixes_two_models_while_newer_ones_take_over(run, raw, monkeypatch):
    """Each model is held inside its pass until the next one serves. An answer is that of one model, with its step."""
    monkeypatch.setattr(batcher, "INLINE_SIZE", 0)  # a pass on the loop could not be held
    monkeypatch.setattr(batcher, "BATCH_SIZE", 2**18)
    checkpoints = run / "checkpoints"
    bodies = [
        as_json(raw.slice(n, rows))
        for n, rows in enumerate((1, 3, 40, 500, 7, 400, 1, 200, 2, 600, 17))
    ]
    alone: dict[int, list[Any]] = {}
    held: dict[int, tuple[threading.Event, threading.Event]] = {}

    def load() -> Scorer:
        scorer = loading(run)()
        step = scorer.servable.meta.step
        alone[step] = [scorer.answer([body])[0].probabilities for body in bodies]
        begun, may_go_on = held[step] = threading.Event(), threading.Event()

        def hold(*_: Any) -> None:
            begun.set()
            assert may_go_on.wait(120)

        scorer.servable.model.register_forward_pre_hook(hold)
        return scorer

    async def talk(http, service):
        async def ask(number: int):
            return number, (await post(http, bodies[number])).json()

        asked = []
        for _ in range(4):
            asked += [asyncio.ensure_future(ask(n)) for n in range(len(bodies))]
            begun, may_go_on = held[service.scorer.servable.meta.step]
            assert await asyncio.to_thread(begun.wait, 120)
            spoilt(latest(checkpoints)[0], other_way)
            assert await take_newer(service, load)
            may_go_on.set()
        held[service.scorer.servable.meta.step][1].set()
        return await asyncio.gather(*asked)

    answers = served(load(), talk, timeout=120)
    assert {answer["step"] for _, answer in answers} == alone.keys()
    assert len(alone) == 5
    for number, answer in answers:
        for step, expected in alone.items():
            same = np.allclose(answer["probabilities"], expected[number], rtol=0, atol=1e-6)
            assert same == (step == answer["step"])


def other_way(tensors) -> None:
    for key, value in tensors.items():
        if key.startswith("model.") and ".tower." in key:
            value.mul_(-0.9)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_that_another_one_replaces_while_it_is_loaded_is_not_served(
    run, monkeypatch, when
):
    """Otherwise the weights of one would answer with the step, the version and the state of the other."""
    path, meta = latest(run / "checkpoints")

    def replaced(given: Path) -> None:
        if when == "after":
            served_model_check(given)
        spoilt(path, other_way)
        newer = latest(run / "checkpoints")[0]
        shutil.rmtree(path)
        newer.rename(path)
        if when == "before":
            served_model_check(given)

    served_model_check = served_model.check
    monkeypatch.setattr(served_model, "check", replaced)
    with raises(CheckpointError, path.name, "while it was loaded"):
        Servable.load(run)
    monkeypatch.undo()
    (run / "checkpoints" / "LATEST").write_text(path.name)
    assert Servable.load(run).meta.step == meta.step + 1


def test_nothing_ends_the_taking_over_and_health_says_what_fails(run, tmp_path, monkeypatch):
    """Each damage is seen by a look, named in /health, and once it is mended a newer checkpoint takes over again."""
    checkpoints = run / "checkpoints"
    newest = latest(checkpoints)[0]
    pointer, (meta, values) = checkpoints / "LATEST", meta_of(run)
    now = [0.0]

    def written(**changed: object) -> bytes:
        return json.dumps({**values, **changed}).encode()

    def vanishes() -> Scorer:
        shutil.move(newest, tmp_path / "away")
        return load_newest()

    def leaves() -> Scorer:
        raise SystemExit("a user's module")

    model = values["config"]["model"]
    other_model = {**values["config"], "model": {**model, "width": 32}}
    damages = [
        *((pointer, text) for text in (b"\xff\xfe\x00", b"/\n", None)),
        *((meta, text) for text in (b"[]", None)),
        *((meta, written(config=config)) for config in ({}, other_model)),
    ]

    async def talk(http, service):
        for number, (path, damage) in enumerate(damages):
            service.take(first)
            whole = path.read_bytes()
            path.unlink()
            if damage is None:
                path.mkdir()
            else:
                path.write_bytes(damage)
            now[0] = 100.0 * number
            assert not await look(service)
            now[0] += 5
            assert not await look(service)
            health = (await http.get("/health")).json()
            assert (health["ok"], health["checkpoint"]) == (True, "step-000000030")
            about = health["reload"]
            assert about["failing"], damage
            assert about["error"]
            assert about["since"] == iso_time(100.0 * number), "since the first of them"
            path.rmdir() if damage is None else path.unlink()
            path.write_bytes(whole)
            now[0] += 5
            assert await look(service), damage
            health = (await http.get("/health")).json()
            assert (health["checkpoint"], health["reload"]["failing"]) == (newest.name, False)
        service.take(first)
        for load, error in (
            (leaves, "SystemExit: a user's module"),
            (vanishes, "No such file or directory"),
        ):
            assert not await look(service, load)
            assert error in (await http.get("/health")).json()["reload"]["error"]
        shutil.move(tmp_path / "away", newest)
        # The same checkpoint, saved once more, is another one.
        assert await look(service)
        assert not await look(service)
        meta.write_text(json.dumps({**values, "rows": values["rows"] + 1}))
        assert await look(service)
        return (await http.get("/health")).json()

    load_newest = loading(run)
    monkeypatch.setattr(server, "say", Mock(side_effect=BrokenPipeError))

    def look(service, load=load_newest):
        return take_newer(service, load)

    pointer.write_text("step-000000030\n")
    first = load_newest()
    pointer.write_text(newest.name + "\n")

    health = served(first, talk, lambda: now[0])
    assert (health["since"], health["reload"]["failing"]) == ("1970-01-01T00:10:10+00:00", False)


def test_the_best_checkpoint_is_served_if_asked_until_a_better_one_takes_over(run):
    old, new = (run / "checkpoints" / f"step-{step:09d}" for step in (30, 38))
    mark_best(old, 0.7)

    load = loading(run, take_best=True)

    async def talk(http, service):
        taken = [await take_newer(service, load, take_best=True)]
        mark_best(new, 0.8)
        taken.append(await take_newer(service, load, take_best=True))
        return [*taken, service.scorer.servable.meta.step]

    first = load()
    assert first.servable.meta.step == 30
    assert served(first, talk) == [False, True, 38]


# ---- models that are no numbers


def spoilt(path: Path, change) -> None:
    """A newer checkpoint, as another program might write it: the one in `path` with other weights."""
    reader = Checkpoint(path)
    tensors = reader.tensors(reader.sizes)
    change(tensors)
    meta = latest(path.parent)[1]
    rewritten(tensors, path.parent / f"step-{meta.step + 1:09d}", replace(meta, step=meta.step + 1))


def one_nan(tensors) -> None:
    next(v for k, v in tensors.items() if "embedding_bags.C5" in k and k.startswith("model."))[
        7, 3
    ] = torch.nan


def far_too_large(factor: float):
    def change(tensors) -> None:
        for value in (v for k, v in tensors.items() if k.startswith("model.") and ".over." in k):
            value.mul_(factor)

    return change


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (one_nan, ["step-000000039", "not finite", ".C5.weight (1 of "]),
        (far_too_large(1e25), ["step-000000039", "no numbers"]),
        (far_too_large(1e4), ["step-000000039", "0 or 1"]),
    ],
)
def test_a_model_without_sane_answers_never_takes_over_and_health_says_why(run, raw, change, facts):

    load = loading(run)
    first = load()
    spoilt(first.servable.path, change)

    async def talk(http, service):
        assert not await take_newer(service, load)
        return await post(http, as_json(raw.slice(0, 5))), (await http.get("/health")).json()

    answer, health = served(first, talk)
    assert (answer.status_code, answer.json()["step"]) == (200, 38)
    assert (health["checkpoint"], health["reload"]["failing"]) == ("step-000000038", True)
    assert_names(health["reload"]["error"], *facts)
    with raises(CheckpointError, *facts):  # at the start, too
        load()


def test_a_row_for_which_the_model_has_no_number_is_refused_alone(wide):
    """Its value is one of float32, and nothing in the spec makes it smaller: here a model multiplies it by itself."""
    passes = []

    def model(dense, _sparse):
        passes.append(len(dense))
        return dense.square().sum(1)

    scorer = Scorer(replace(wide, model=model), most_rows=10)
    bodies = b'{"rows":[{},{"I5":3e38}]}', b'{"rows":[{"I5":"x"}]}', b'{"rows":[{"I5":2.5}]}'
    too_large, no_number, answer = scorer.answer(bodies)
    assert passes == [4], "others wait for no second pass"
    assert [answer] == scorer.answer(bodies[-1:])
    assert (too_large.status, no_number.status) == (422, 422)
    assert_names(str(too_large), "rows[1]", "no number", "'I5'")
    assert_names(str(no_number), "rows[0]", "not a number", "'I5'")


def test_the_pages_program_gives_the_logits_of_the_model(folder, tmp_path, monkeypatch):
    (tmp_path / "run").symlink_to(folder / "run")
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python", "docs/serving.md")
    names: dict[str, Any] = {}
    exec(block, names)
    program = torch.export.load("dense.pt2").module()
    shapes = [(7, *example.shape[1:]) for example in names["inputs"]]
    inputs = [torch.randn(shape) for shape in shapes]
    torch.testing.assert_close(program(*inputs), names["tower"](*inputs))


# ---- runs that cannot be served


def test_no_pickle_in_a_run_folder_is_read_by_any_program(run, tmp_path, forks):
    """Every one would make a file; nor does a program look up a name for a pickle."""
    marker = tmp_path / "code ran"
    bomb = pickle.dumps(Bomb(marker))
    for place in (run, run / "checkpoints", *(run / "checkpoints").glob("step-*")):
        for name in (
            ".metadata",
            "__0_0.distcp",
            "data.pkl",
            "layout.pkl",
            "model.pt",
            "optimizer.pt",
            "config.pkl",
            "agent.pkl",
            "rank-00001.safetensors",
            "_common_metadata",
        ):
            (place / name).write_bytes(bomb)
    process = forks.run("tests.dlrm.serving.no_pickles", run, tmp=tmp_path)
    assert last_json(process) == []
    assert not marker.exists()


def test_a_spoilt_checkpoint_is_not_served(run):
    part = next(latest(run / "checkpoints")[0].glob("rank-*"))
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([255 - data[-1]]))
    with raises(CheckpointError, part.name, "damaged"):
        Servable.load(run)
