"""Taking up newer versions of a table: what changes, what stays, and runs through schema changes and a crash."""

import json
import re
import signal
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch

from benchmarks.small_table import small_table
from sluice import FeatureTable
from sluice.dlrm.follow import transplant
from sluice.dlrm.follow.table_diff import TableDiff
from sluice.dlrm.follow.transplant import moved_weights
from sluice.dlrm.model.towers import build as tower
from sluice.dlrm.session import run
from sluice.dlrm.training import assemble as build
from sluice.dlrm.training import loaders
from tests import ports
from tests.dlrm import clicks_table
from tests.dlrm.rig import META, SMALL, logged, run_words, torchrec_warns, written
from tests.dlrm.transformed_table import MODULE, TRANSFORMS
from tests.product import (
    LASTS_S,
    Checkpoint,
    CheckpointError,
    CheckpointMeta,
    Checkpoints,
    Config,
    ConfigError,
    Footprint,
    LostVersion,
    ModelConfig,
    OptimConfig,
    TableStore,
    between,
    latest,
    machine,
    pins,
    spread_rows,
    tower_of,
    vacuum,
    world,
)
from tests.raises import assert_names, raises
from tests.run_program import last_json

pytestmark = pytest.mark.slow

BATCH = 256
EXTRA = '[[column]]\nname = "C17"\nrole = "sparse"\nops = [{op = "hash", size = 50}]\n'


def columns(*without: str, **more: str) -> dict[str, str]:
    return {
        name: kind for name, kind in {**clicks_table.COLUMNS, **more}.items() if name not in without
    }


def features(*without: str, more: str = "") -> str:
    kept = [
        part
        for part in clicks_table.FEATURES.split("[[column]]")
        if part.strip() and not any(f'"{name}"' in part for name in without)
    ]
    return "".join(f"[[column]]{part}" for part in kept) + more


def with_c17(raw: pa.Table) -> pa.Table:
    return raw.append_column("C17", pa.array([f"v{n % 11}" for n in range(raw.num_rows)]))


# ---- what changes


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> dict[str, FeatureTable]:
    """A table through four changes of its schema."""
    path = tmp_path_factory.mktemp("versions") / "table"
    raw = clicks_table.raw_rows(2000)
    more = with_c17(clicks_table.raw_rows(2000, first=2000))
    tables = {"first": clicks_table.write(path, raw)}
    text = clicks_table.spec_text(columns(C17="text"), features("I1", more=EXTRA))
    tables["other columns"] = clicks_table.write(path, more, text=text, mode="overwrite")
    text = clicks_table.spec_text(
        columns(), features("I1").replace("oov = 4", "oov = 5").replace("C*", "C[15]*")
    )
    tables["another way"] = clicks_table.write(path, raw, text=text, mode="overwrite")
    return tables


def test_a_column_whose_values_another_release_converted_begins_anew(versions):
    first = versions["first"]
    fields = [replace(f, values_rule=2) if f.name == "C1" else f for f in first.fields]
    now = replace(first, fields=tuple(fields))
    assert set(between(first, now).anew) == set(between(now, first).anew) == {"C1"}
    assert not between(now, now).anew
    with raises(CheckpointError, "C1", "sluice train", first.uri):
        CheckpointMeta.of(first, {}).check(now)


def test_changes_are_listed_by_column(versions):
    changes = between(versions["first"], versions["other columns"])
    assert (changes.before, changes.after) == (0, 1)
    assert (changes.added, changes.dropped) == (("C17",), ())
    assert (changes.dense_added, changes.dense_dropped) == ((), ("I1",))
    assert set(changes.grown) >= {
        "C1",
        "C5",
    }  # new rows brought new values; those of before keep their ids
    assert not changes.anew
    assert "learned anew" not in changes.text
    assert changes.keeps("C1")
    assert not changes.keeps("C17")
    assert_names(changes.text, "version 0", "becomes 1", "new column 'C17'", "'I1' is gone")


def test_a_column_that_is_made_in_another_way_begins_anew(versions):
    changes = between(versions["first"], versions["another way"])
    assert set(changes.anew) == {"C1", "C5", "C14"}
    assert "spec" in changes.anew["C1"]
    assert changes.dropped == ("C9",)
    assert not changes.keeps("C1")


def test_a_vocabulary_that_was_learned_anew_is_noticed(tmp_path):
    """The same spec, as many values or more, but other ids for them."""
    raw = clicks_table.raw_rows(2000)
    before = clicks_table.write(tmp_path / "a", raw)
    after = clicks_table.write(tmp_path / "b", clicks_table.raw_rows(3000, first=9000))
    assert set(between(before, after).anew) >= {"C1", "C14"}
    assert "learned anew" in between(before, after).anew["C1"]


def test_without_a_spec_tables_are_compared_by_size(tmp_path):
    before = small_table(tmp_path / "a", rows=500, values=20)
    after = small_table(tmp_path / "b", rows=500, values=30)
    assert between(before, after).grown["C1"] == (23, 33)
    assert "C1" in between(after, before).anew


# ---- what stays


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"kind": "dcn", "cross_layers": 2},
        {"kind": "dcn", "cross_layers": 2, "cross_rank": 4},
        *({"kind": kind} for kind in ("wide_deep", "deepfm", "xdeepfm", "pnn", "dnn")),
    ],
)
def test_a_tower_answers_as_before_when_features_come_go_and_change_places(how):
    """With a new column whose vector is 0 for the factorisation machine, and gone columns whose vectors were 0."""
    config = ModelConfig(width=4, dense_layers=(8,), over_layers=(8,), **how)
    torch.manual_seed(1)
    was = (["d0", "d1", "d2"], ["a", "b", "c"])
    now = (["d2", "d0", "new"], ["c", "new", "a"])
    old, new = (tower(config, dense=3, columns=3) for _ in range(2))
    before, after = (tower_of(config.kind).labels(config, *names) for names in (was, now))
    values = old.state_dict()
    assert set(before) <= set(values)
    new.load_state_dict(
        {n: moved_weights(v, before[n], after[n]) if n in before else v for n, v in values.items()}
    )
    rows = 16
    dense, pooled, wide = torch.randn(rows, 3), torch.randn(rows, 3, 4), torch.randn(rows, 3, 4)
    dense[:, 1], pooled[:, 1], wide[:, 1] = 0, 0, 0  # d1 and b, which go
    shown = torch.stack([dense[:, 2], dense[:, 0], torch.randn(rows)], 1)
    other = torch.randn(rows, 4)
    strange = torch.zeros(rows, 4) if config.kind == "deepfm" else other
    moved_pooled = torch.stack([pooled[:, 2], strange, pooled[:, 0]], 1)
    moved_wide = torch.stack([wide[:, 2], torch.zeros(rows, 4), wide[:, 0]], 1)
    inputs = [(dense, pooled), (shown, moved_pooled)]
    if "wide" in tower_of(config.kind).inputs:
        inputs = [(*inputs[0], wide), (*inputs[1], moved_wide)]
    with torch.no_grad():
        torch.testing.assert_close(new(*inputs[1]), old(*inputs[0]))


@torchrec_warns
@pytest.mark.parametrize(("optimiser", "dtype"), [("rowwise_adagrad", "fp32"), ("adagrad", "fp16")])
def test_rows_weights_and_states_are_carried_over(versions, tmp_path, optimiser, dtype):
    """Each kind of table: grown, spread and grown, new, gone; and both optimisers' states."""
    first, second = versions["first"], versions["other columns"]

    def rows(parts, name: str) -> torch.Tensor:
        weight = parts.model.state_dict()[f"tables.embedding_bags.{name}.weight"]
        return weight.local_shards()[0].tensor

    def states(parts, name: str) -> dict[str, torch.Tensor]:
        state = parts.model.fused_optimizer.state_dict()["state"]
        return {
            k: v.local_shards()[0].tensor
            for k, v in state[f"tables.embedding_bags.{name}.weight"].items()
            if hasattr(v, "local_shards")
        }

    with world() as here:

        def made(table: FeatureTable):
            config = Config(
                data=table.uri,
                version=table.version,
                batch_size=BATCH,
                model=ModelConfig(**SMALL, spread=("C1",), table_dtype=dtype),
                optim=OptimConfig(table_optimiser=optimiser, lr=0.1),
                reader="arrow",
            )
            now = Footprint.of(config, table, machine(1, 1))
            dense = sum(f.role == "dense" for f in table.fields)
            return config, build.parts_of(config, now.layout, dense, now.placement, here)

        config, parts = made(first)
        with loaders.training(
            config, first, rank=0, local_ranks=1, conditions=loaders.conditions(config, tmp_path, 0)
        ) as batches:
            for batch in batches:
                parts.dense.zero_grad()
                parts.model(*parts.layout.features(batch)).square().sum().backward()
                parts.dense.step()
        meta = CheckpointMeta.of(first, config.to_dict())
        saved = Checkpoints(tmp_path, parts, here, keep=1)
        saved.save(replace(meta, step=1))
        saved.close()
        after_config, after = made(second)
        fresh = {t.name: rows(after, t.name).clone() for t in after.layout.tables}
        changes = between(first, second)
        transplant.transplant(
            latest(tmp_path)[0],
            after,
            after=CheckpointMeta.of(second, after_config.to_dict()),
            changes=changes,
        )

        for name in ("C5", "C14", "tags", "C9"):
            old = rows(parts, name)
            assert torch.equal(rows(after, name)[: len(old)], old)
            assert torch.equal(rows(after, name)[len(old) :], fresh[name][len(old) :])
            assert states(parts, name)
            for key, state in states(parts, name).items():
                assert torch.equal(states(after, name)[key][: len(state)], state)
                assert state.abs().sum() > 0
                assert not states(after, name)[key][len(state) :].any()
        grown = changes.grown["C1"]
        assert grown[1] > grown[0]
        for was, now in (
            (rows(parts, "C1"), rows(after, "C1")),
            *zip(states(parts, "C1").values(), states(after, "C1").values(), strict=True),
        ):
            for number in (0, 3, grown[0] - 1):
                at = [int(spread_rows(torch.tensor([number]), n)) for n in grown]
                assert torch.equal(now[at[1]], was[at[0]])
        assert torch.equal(rows(after, "C17"), fresh["C17"])
        name, kept = "tower.dense.0.weight", [0, 2, 3]  # number, I2, I5: without I1
        was, now = (trained.dense_parameters[name] for trained in (parts, after))
        assert torch.equal(now, was[:, kept])
        old_state, new_state = (
            trained.dense.state_dict()["state"][name] for trained in (parts, after)
        )
        assert torch.equal(new_state["exp_avg"], old_state["exp_avg"][:, kept])
        assert new_state["step"] == old_state["step"] > 0


@pytest.mark.parametrize("cut", [1, 2])
def test_a_grown_table_with_a_copy_on_each_rank_keeps_its_rows(tmp_path, cut):
    """Neither its weights nor its states are cut now. If the columns were `cut`, a row's state is the mean of its
    parts."""
    weights, states = (
        "model.tables.embedding_bags.t.weight",
        "tables.state.tables.embedding_bags.t.weight.t.momentum1",
    )
    old = {weights: torch.rand(3, 4), states: torch.rand(cut * 3)}
    written(old, tmp_path / "checkpoints" / "step-000000001", META)
    stored = Checkpoint(latest(tmp_path / "checkpoints")[0])
    for key, grown in ((weights, torch.zeros(5, 4)), (states, torch.zeros(5))):
        stored.read(transplant._rows(stored, key, grown, 3, 5))
        assert torch.equal(grown[:3], old[key].reshape(-1, *grown[:3].shape).mean(0))
        assert not grown[3:].any()


@pytest.mark.parametrize("rows", [(7, 11), (8, 21), (64, 65)])
def test_a_grown_spread_table_that_is_cut_by_columns_keeps_the_row_of_each_id(rows):
    """On each rank, also if the table is cut by rows and columns. So do the states of its optimiser."""
    old_rows, new_rows = rows
    ids = torch.arange(old_rows)
    before, after = (spread_rows(ids, count) for count in rows)
    old, states = torch.rand(old_rows, 6), torch.rand(old_rows)
    top = new_rows // 2
    for low, high in ((0, new_rows), (0, top), (top, new_rows)):
        for left, right in ((0, 6), (0, 2), (2, 6), (4, 6)):
            cut = torch.zeros(high - low, right - left)
            transplant._fill_spread_table(old, sharded(cut, (low, left)), *rows)
            full = torch.zeros(new_rows, 6)
            full[after] = old[before]
            assert torch.equal(cut, full[low:high, left:right])
        cut = torch.zeros(high - low)
        transplant._fill_spread_table(states, sharded(cut, (low,)), *rows)
        full = torch.zeros(new_rows)
        full[after] = states[before]
        assert torch.equal(cut, full[low:high])


def sharded(part: torch.Tensor, first: tuple[int, ...]) -> SimpleNamespace:
    """Returns a tensor of which this rank holds one part."""
    about = SimpleNamespace(shard_offsets=list(first), shard_sizes=list(part.shape))
    return SimpleNamespace(local_shards=lambda: [SimpleNamespace(metadata=about, tensor=part)])


def test_a_run_that_changes_versions_counts_its_steps_from_there(tmp_path):
    """The step within an epoch of the newer version is counted from the change, `since`."""
    table = small_table(tmp_path / "table", rows=100)
    meta = replace(CheckpointMeta.of(table, {}), step=37, epoch=2, rows=999, since=12)
    followed = meta.following(table, {})
    assert (followed.since, followed.step, followed.epoch, followed.rows) == (37, 37, 2, 999)
    assert replace(followed, step=40).following(table, {}).since == 40


# ---- whole runs


def words(folder: Path, *more: object) -> list[object]:
    return run_words(folder, f"--batch-size {BATCH} --log-every 2", *more)


def lost_files(folder: Path, version: int) -> list[str]:
    try:
        files = FeatureTable.open(folder, version).files
    except LostVersion as error:
        return [str(error)]
    return [file.path for file in files if not Path(file.path).exists()]


def vacuum_at_once(folder: Path) -> int:
    """Removes everything but the newest version and pins, three times. Returns the number of files removed."""
    store, removed = TableStore(folder), 0
    for _ in range(3):
        removed += len(vacuum(store, keep=1, now=time.time(), grace_s=0.0).files)
        # A reader that pinned a lost version takes that pin back. Each pin has a name of its own.
        lost = {
            pin.name: lost
            for pin in pins(store, time.time())
            if (lost := lost_files(folder, pin.version))
        }
        deadline = time.monotonic() + 60
        while lost.keys() & {pin.name for pin in pins(store, time.time())}:
            assert time.monotonic() < deadline, lost
            time.sleep(0.02)  # another process makes it true
    return removed


def test_a_run_follows_a_writer_whose_old_versions_are_vacuumed_at_once(tmp_path, forks):
    """A run takes up whole versions only. Every second round passes while it takes up none."""
    clicks_table.write(tmp_path / "table", clicks_table.raw_rows(1500))
    removed, given = 0, words(tmp_path, "--follow --epochs 1000")
    with forks.start("dlrm.train", *given, tmp=tmp_path) as trainer:
        trainer.until("validation after")
        for number in range(1, 5):
            raw = clicks_table.raw_rows(1500, first=number * 1500)
            mode = "append" if number % 3 else "overwrite"
            clicks_table.write(tmp_path / "table", raw, mode=mode)
            removed += vacuum_at_once(tmp_path / "table")
            if number % 2 == 0:
                trainer.until(f"becomes {number}")
                trainer.until("validation after")
        removed += vacuum_at_once(tmp_path / "table")
        process = trainer.preempted()
    assert removed > 0
    assert last_json(process)["version"] == 4
    taken = [(e["before"], e["after"]) for e in logged(tmp_path / "run", "follow")]
    assert [after for _, after in taken] == [before for before, _ in taken[1:]] + [4], taken
    assert FeatureTable.open(tmp_path / "table").check() == []


def test_a_run_that_follows_takes_the_newest_version_if_its_choice_is_gone(tmp_path, forks):
    """The version is removed after both ranks have opened it, and before it is pinned, two times."""
    small_table(tmp_path / "table", rows=800, files=1, values=50)
    given = (tmp_path / "table", 2, *words(tmp_path, "--follow"))
    process = forks.run("tests.dlrm.vanishing_version", *given, tmp=tmp_path, ranks=2)
    assert last_json(process)["version"] == 2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["version"] == 2
    assert latest(tmp_path / "run" / "checkpoints")[1].version == 2
    assert pins(TableStore(tmp_path / "table"), time.time()) == ()


def test_a_run_follows_two_schema_changes_and_a_crash(tmp_path, forks):
    """On two ranks. The first change comes while it trains; all is killed later; the second comes before the resume.
    Each rank is watched as it goes."""
    folder, rows, port = tmp_path, 3000, ports.free(2)
    clicks_table.write(folder / "table", clicks_table.raw_rows(rows))
    more = f"--follow --epochs 1000 --save-every 4 --metrics-port {port}"
    with forks.start("dlrm.train", *words(folder, more), tmp=folder, ranks=2) as started:
        started.until("validation after 1 epoch")
        clicks_table.write(
            folder / "table",
            with_c17(clicks_table.raw_rows(rows, first=rows)),
            text=clicks_table.spec_text(columns(C17="text"), features("I1", more=EXTRA)),
            mode="overwrite",
        )
        started.until("version 0 of the table becomes 1")
        started.until("validation after")
        for rank in (0, 1):
            address = f"http://127.0.0.1:{port + rank}/metrics"
            with urllib.request.urlopen(address, timeout=60) as reply:
                exported = reply.read().decode()
            assert_names(
                exported,
                f"sluice_train_rank {rank}.0",
                "sluice_train_table_version 1.0",
                'sluice_eval_auc{split="validation"}',
                'sluice_loader_stage_rows_total{stage="decode"}',
            )
        assert [pin.version for pin in pins(TableStore(folder / "table"), time.time())] == [1]
        started.send(signal.SIGKILL)
    meta = latest(folder / "run" / "checkpoints")[1]
    assert (meta.version, "C17" in meta.columns, "I1" in meta.dense) == (1, True, False)

    clicks_table.write(
        folder / "table",
        clicks_table.raw_rows(rows),
        mode="overwrite",
        text=clicks_table.spec_text(
            columns(), features("I2", more=TRANSFORMS).replace("C*", "C[15]*")
        ),
    )
    process = forks.train(
        *f"--run-dir {folder}/run --resume --epochs".split(),
        meta.epoch + 3,
        "--allow-code",
        MODULE,
        tmp=folder,
        ranks=2,
    )
    result, followed = last_json(process), logged(folder / "run", "follow")
    assert [(e["before"], e["after"]) for e in followed] == [(0, 1), (1, 2)]
    assert (followed[0]["added"], followed[0]["dense_dropped"]) == (["C17"], ["I1"])
    assert set(followed[1]["dropped"]) == {"C17", "C9"}
    assert "C1" in followed[0]["grown"]
    assert (result["version"], result["epochs"]) == (2, meta.epoch + 3)
    assert "'I2' is gone" in process.stderr
    assert re.findall(r"step \d+ of (\d+)", process.stderr)[-1] == str(result["steps"])
    made = {
        "pair",
        "both",
        "C1xpair",
        "grams",
    }  # by transforms that the last version's spec brought
    assert set(result["plan"]) == {"C1", "C5", "C14", "tags", *made}
    assert made <= set(followed[1]["added"])
    last = latest(folder / "run" / "checkpoints")[1]
    assert (last.version, last.dense) == (2, ("number", "I1", "I5", "ratio"))
    left = pins(TableStore(folder / "table"), time.time())
    assert [pin.version for pin in left] == [1]  # of the run that was killed, until it expires
    assert left[0].expires <= time.time() + LASTS_S


def test_one_pass_over_the_parts_evaluates_each_before_it_trains_on_it(tmp_path, forks):
    """The run begins with the first version, and passes what each added once."""
    folder, rows = tmp_path, 2000
    for n in range(2):
        clicks_table.write(
            folder / "table",
            clicks_table.raw_rows(rows, first=n * rows),
            mode="append" if n else "create",
        )
    process = forks.train(*words(folder, "--follow parts"), tmp=folder)
    last = last_json(process)
    steps = -(-rows * 8 // 10 // BATCH)  # the last one of each part is padded
    assert (last["steps"], last["version"], last["epochs"]) == (2 * steps, 1, 2)
    assert last["rows_trained"] == 2 * rows * 8 // 10 < 2 * steps * BATCH
    evals = [(m["step"], m["split"], m["rows"]) for m in logged(folder / "run", "eval")]
    part, tenth = rows * 8 // 10, rows // 10
    assert evals == [
        (steps, "validation", tenth),
        (steps, "train", part),
        (2 * steps, "validation", tenth),
        (2 * steps, "test", tenth),
    ]
    assert [e["step"] for e in logged(folder / "run", "epoch")] == [steps, 2 * steps]
    # What is committed later is taken up by a run that was over, unless its checkpoint is damaged.
    clicks_table.write(folder / "table", clicks_table.raw_rows(rows, first=2 * rows), mode="append")
    part_of_it = next(latest(folder / "run" / "checkpoints")[0].glob("rank-*"))
    whole = part_of_it.read_bytes()
    part_of_it.write_bytes(bytes([255 - whole[0]]) + whole[1:])
    again = ("--run-dir", folder / "run", "--resume")
    refused = last_json(forks.train(*again, tmp=folder, code=2))
    assert_names(refused["error"], part_of_it.name, "damaged")
    part_of_it.write_bytes(whole)
    assert last_json(forks.train(*again, tmp=folder))["steps"] == 3 * steps


def test_without_follow_another_version_is_refused_with_the_difference(versions):
    with pytest.raises(CheckpointError) as refused:
        CheckpointMeta.of(versions["first"], {}).check(versions["other columns"])
    for part in (
        "version 0 in the checkpoint, 1 now",
        "column 'C17': not in the checkpoint",
        "column 'C1': ",
        "dense columns: number, I1, I2, I5 in the checkpoint, number, I2, I5 in the table",
    ):
        assert part in str(refused.value)


def test_a_tower_that_reads_a_dropped_column_is_refused():
    changes = TableDiff(before=1, after=2, dropped=("item",))
    with raises(ConfigError, "version 2", "'item'", "dien"):
        run._model(ModelConfig(kind="dien", history="past", target="item"), changes)
    assert run._model(ModelConfig(spread=("item", "b")), changes).spread == ("b",)
