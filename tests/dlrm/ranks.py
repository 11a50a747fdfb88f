"""What runs on every rank in test_ranks.py: `python -m tests.dlrm.ranks FOLDER` begins two ranks, then one, then four,
and says what the first of each found. With names of kernels it is one of torchrun's ranks (test_gpu.py)."""

import json
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from sluice.dlrm.evaluation.split import evaluate
from sluice.dlrm.model.local_parts import local_parts
from sluice.dlrm.model.ranker import loss_of
from sluice.dlrm.ranks import Ranks
from sluice.dlrm.telemetry.silence_warnings import quiet
from sluice.dlrm.training.assemble import TrainingParts
from tests.dlrm.rig import (
    DENSE,
    KINDS,
    META,
    REAL,
    SIZES,
    SMALL,
    FakeFeed,
    FakeSplit,
    PaddedFeed,
    bagged,
    batch,
    kinds,
    real_rows,
)
from tests.product import (
    BatchChecker,
    Checkpoint,
    Checkpoints,
    Config,
    LoaderError,
    ModelConfig,
    NotANumber,
    OptimConfig,
    Ranker,
    StepFigures,
    SyncedBatches,
    Table,
    TableLayout,
    Trainer,
    latest,
    machine,
    parts_of,
    placed,
    world,
)

_LIMIT_S = 240.0
MODEL = ModelConfig(width=8, dense_layers=(16,), over_layers=(16,))
TABLES = [
    Table(name=n, rows=r, width=8, longest=3 if n == "small" else 1) for n, r in SIZES.items()
]
NAMES = list(SIZES)
ROWS, STEPS = 64, 6
PLAIN = OptimConfig(dense_optimiser="adagrad", dense_lr=0.05)
WARM = replace(PLAIN, schedule="warmup=4", dense_schedule="warmup=4")
SCHEDULE = "warmup=2,decay_start=2,decay=12"
MIXED = OptimConfig(
    dense_optimiser="adam", dense_lr=0.02, schedule=SCHEDULE, dense_schedule=SCHEDULE, clip=0.1
)
WITH_BAGS = {
    "bags": ModelConfig(**SMALL),
    "dien": ModelConfig(kind="dien", history="small", target="mid", **SMALL),
    "dien, one table": ModelConfig(
        kind="dien",
        history="small",
        target="tiny",
        history_table="target",
        spread=("tiny",),
        **SMALL,
    ),
}


def build(
    here: Ranks, how: str, optim: OptimConfig = PLAIN, **settings
) -> tuple[Config, TrainingParts]:
    sharding = str(copies_of_all(here)) if how == "data" else how
    config = Config(
        data="fake",
        version=0,
        batch_size=ROWS,
        ranks=here.ranks,
        epochs=2,
        sharding=sharding,
        seed=1,
        optim=optim,
        **{"model": MODEL, "log_every": 1, **settings},
    )
    items = (
        config.model.target if config.model.history_table == "target" else ""
    )  # as many as the history has
    layout = TableLayout(
        config.model,
        [
            replace(t, width=config.model.width, rows=SIZES["small"] if t.name == items else t.rows)
            for t in TABLES
        ],
    )
    if how == "data":
        Path(config.sharding).write_text(json.dumps({t.name: "data" for t in layout.tables}))
    placement = placed(config, layout.tables, machine(here.ranks, here.local_ranks))
    return config, parts_of(config, layout, len(DENSE), placement, here)


def copies_of_all(here: Ranks) -> Path:
    """A file that asks for a copy of every table on each rank: no word of the command line does."""
    return Path(os.environ["TMPDIR"]) / f"copies-{here.ranks}-{here.rank}.json"


def kinds_of(model) -> dict[str, str]:
    """Table → sharding kind, as the sharded module itself has it."""
    return {
        name: parameter.sharding_type.removesuffix("_wise").removesuffix("_parallel")
        for module in model.plan.plan.values()
        for name, parameter in module.items()
    }


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


def whole(value, here: Ranks) -> torch.Tensor:
    """A tensor in full on every rank, put together from its shards if it has them."""
    if not hasattr(value, "local_shards"):
        return value.detach().cpu().clone()
    full = torch.zeros(*value.size())
    fill(full, local_parts(value))
    return here.sum(full)


def fill(full: torch.Tensor, parts) -> None:
    for first, part in parts:
        full[tuple(slice(o, o + n) for o, n in zip(first, part.shape, strict=True))] = part


def whole_weights(model, here: Ranks) -> dict[str, torch.Tensor]:
    return {name: whole(value, here) for name, value in model.state_dict().items()}


def first_bias_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the last bias at the rate of the first batch's labels, as training begins."""
    rate = batch(0, ROWS).label.mean()
    last = [k for k in weights if "tower.over." in k and k.endswith("bias")][-1]
    return weights | {last: torch.log(rate / (1 - rate)).view(1)}


def twin(
    weights: dict[str, torch.Tensor], steps: int, optim: OptimConfig, parts: int
) -> tuple[list[float], dict]:
    """The same training as by WARM, written plainly: whole tables, dense gradients, the optimisers' formulas by hand.

    `parts`: pieces that tables are cut into by columns. Each has row-wise Adagrad's state for itself."""
    w = {k: v.clone().requires_grad_() for k, v in weights.items()}
    state = {
        k: torch.zeros(len(v), parts, 1) if "embedding_bags" in k else torch.zeros_like(v)
        for k, v in weights.items()
    }
    tables = {n: next(k for k in w if f".{n}.weight" in k) for n in NAMES}
    linear = [
        k.removesuffix(".weight") for k in w if k.endswith(".weight") and "embedding_bags" not in k
    ]
    towers = {
        part: sorted(p for p in linear if part in p) for part in ("tower.dense.", "tower.over.")
    }
    losses = []
    for step in range(steps):
        b = batch(step, ROWS)
        x = b.dense
        for p in towers["tower.dense."]:
            x = torch.relu(x @ w[f"{p}.weight"].T + w[f"{p}.bias"])
        ids = b.values.view(len(NAMES), ROWS).long()
        vectors = torch.stack([x, *(w[tables[n]][ids[i]] for i, n in enumerate(NAMES))], dim=1)
        dots = torch.einsum("bie,bje->bij", vectors, vectors)
        upper = torch.triu_indices(len(NAMES) + 1, len(NAMES) + 1, offset=1)
        z = torch.cat([x, dots[:, upper[0], upper[1]]], dim=1)
        for i, p in enumerate(towers["tower.over."]):
            z = z @ w[f"{p}.weight"].T + w[f"{p}.bias"]
            z = torch.relu(z) if i < len(towers["tower.over."]) - 1 else z
        loss = torch.nn.functional.binary_cross_entropy_with_logits(z.squeeze(1), b.label)
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(w.values()))
        warmth = min(1.0, (step + 1) / 4)
        with torch.no_grad():
            for (k, value), g in zip(w.items(), grads, strict=True):
                if "embedding_bags" in k:
                    cut = g.view(len(g), parts, -1)
                    state[k] += (cut * cut).mean(2, keepdim=True)
                    value.sub_((warmth * optim.lr * cut / (state[k].sqrt() + 1e-8)).view_as(g))
                else:
                    state[k] += g * g
                    value.sub_(warmth * optim.dense_lr * g / (state[k].sqrt() + 1e-10))
    return losses, {k: v.detach() for k, v in w.items()}


def trainer_of(
    here: Ranks,
    config: Config,
    parts: TrainingParts,
    saved: Checkpoints,
    feed: FakeFeed,
    *,
    observe=lambda _: None,
    evaluate=lambda _: False,
    **more,
) -> Trainer:
    return Trainer(
        config=config,
        world=here,
        parts=parts,
        feed=feed,
        checker=BatchChecker(SIZES, DENSE, "fake"),
        checkpoints=saved,
        validator=SimpleNamespace(evaluate_and_check=evaluate),
        journal=SimpleNamespace(metric=observe, event=lambda _: None, warn=lambda *_: None),
        figures=StepFigures(here),
        **{"synced_batches": SyncedBatches(here, lambda: False), "meta": META, **more},
    )


def trained(
    here: Ranks,
    how: str,
    folder: Path,
    optim: OptimConfig = PLAIN,
    *,
    feed: type = FakeFeed,
    stop_at: int | None = None,
    resume: Path | None = None,
    ahead: bool | None = None,
    **settings,
):
    config, parts = build(here, how, optim, **settings)
    losses: list[float] = []
    feed = feed(STEPS, ROWS, here.rank, here.ranks, bags=bool(config.model.history))
    saved, meta = Checkpoints(folder, parts, here, keep=2), META
    if resume is not None:
        Checkpoint(resume).load(parts, here)
        meta = replace(META, step=stop_at or 0)
        feed.position = {"epoch": 0, "step": stop_at}
        stop_at = None
    fake = FakeSplit([batch(7000, ROWS, here.rank, here.ranks)])

    def judge(_) -> bool:
        looks.append(evaluate(parts, fake, "fake", here).quality.logloss)
        return False

    looks: list[float] = []
    trainer = trainer_of(
        here,
        config,
        parts,
        saved,
        feed,
        meta=meta,
        evaluate=judge if config.evals > 1 else lambda _: False,
        ahead=ahead,
        observe=lambda m: losses.append(m["loss"]),
        synced_batches=SyncedBatches(
            here,
            lambda: here.rank == here.ranks - 1 and len(losses) + 2 * bool(ahead) == stop_at,
        ),
    )
    try:
        trainer.train()
        saved.wait()
    finally:
        saved.close()
    return losses + looks, parts, trainer


def unsharded(config: Config, parts: TrainingParts, weights: dict[str, torch.Tensor]) -> Ranker:
    """The same model in one piece, with a decay of 0.5."""
    alone = Ranker(config.model, parts.layout, len(DENSE), decay=0.5).to_empty(device="cpu")
    alone.load_state_dict(weights)
    if not config.model.history:  # its parts are not sharded, and not in the state either
        alone.tower.load_state_dict(
            {k.removeprefix("tower."): v for k, v in weights.items() if k.startswith("tower.")}
        )
    for name, buffer in alone.named_buffers():
        buffer.copy_(parts.model.module.get_buffer(name))
    return alone


def against_the_unsharded(here: Ranks, how: str, model: ModelConfig) -> dict[str, float]:
    """How far one step's logits and gradients are from those of the same model in one piece, on the whole batch.

    Plain gradient descent at a rate of 1 takes a table's gradient off its weights."""
    config, parts = build(
        here, how, OptimConfig(table_optimiser="sgd", lr=1.0, table_decay=0.5), model=model
    )
    before = whole_weights(parts.model, here)
    alone = unsharded(config, parts, before)
    every = bagged(batch(7, ROWS), 7)
    logits = alone(*parts.layout.features(every))
    loss_of(logits, every.label, every.weight).backward()
    mine = bagged(batch(7, ROWS, here.rank, here.ranks), 7, here.rank, here.ranks)
    parts.rates.set_step(0)
    outputs = parts.model(*parts.layout.features(mine))
    loss_of(outputs, mine.label, mine.weight).backward()
    parts.copied.step()
    after = whole_weights(parts.model, here)
    tables = {k for k in before if "embedding_bags" in k}
    return {
        "logits": largest(torch.cat(here.gather_objects(outputs.detach())) - logits.detach()),
        "tables": max(largest(before[k] - after[k] - alone.get_parameter(k).grad) for k in tables),
        "dense": max(
            largest(p.grad - alone.get_parameter(n).grad) for n, p in parts.dense_parameters.items()
        ),
        "moved": min(largest(before[k] - after[k]) for k in tables),
    }


def of_a_padded_batch(here: Ranks, folder: Path, model: ModelConfig, *, ahead: bool) -> dict:
    """How far a step of the trainer on a padded batch is from plain gradient descent on its real rows alone, in one
    piece; and what is counted."""
    optim = OptimConfig(
        table_optimiser="sgd", dense_optimiser="sgd", lr=1.0, dense_lr=1.0, table_decay=0.5
    )
    config, parts = build(here, "row", optim, model=model)
    config = replace(config, epochs=1)
    before = whole_weights(parts.model, here)
    alone = unsharded(config, parts, before)
    real = real_rows(bagged(batch(0, ROWS), 0), REAL)
    loss = loss_of(alone(*parts.layout.features(real)), real.label, real.weight)
    loss.backward()
    lines: list[dict] = []
    saved = Checkpoints(folder, parts, here, keep=1)
    trainer = trainer_of(
        here,
        config,
        parts,
        saved,
        PaddedFeed(1, ROWS, here.rank, here.ranks, bags=True),
        meta=replace(META, step=1, rows=ROWS),
        observe=lines.append,
        ahead=ahead,
    )
    trainer.train()
    saved.close()
    after = whole_weights(parts.model, here)
    moved = {k: before[k] - after[k] for k in before}
    return {
        "moved": max(largest(m) for m in moved.values()),
        "gradients": max(largest(m - alone.get_parameter(k).grad) for k, m in moved.items()),
        "loss": abs(lines[-1]["loss"] - loss.item()),
        "rows": trainer.meta.rows - ROWS,
        "timed": trainer.figures.rows,
    }


class StallingFeed(FakeFeed):
    """On the first rank, batch 3 never comes."""

    def __init__(self, here: Ranks) -> None:
        super().__init__(STEPS, ROWS, here.rank, here.ranks)
        self.stalled, self.closed = threading.Event(), threading.Event()

    def __iter__(self):
        for step, batch_given in enumerate(super().__iter__()):
            if step == 3 and not self.rank:
                self.stalled.set()
                self.closed.wait(60)
                raise LoaderError("closed")
            yield batch_given

    def close(self) -> None:
        self.closed.set()


def stopped_in_a_stall(here: Ranks, folder: Path) -> dict:
    """The rank that waits for its batch is asked to stop; the others have theirs."""
    config, parts = build(here, "auto")
    feed, asked, losses = StallingFeed(here), threading.Event(), []
    saved = Checkpoints(folder, parts, here, keep=2)
    synced_batches = SyncedBatches(here, asked.is_set)
    trainer = trainer_of(
        here,
        config,
        parts,
        saved,
        feed,
        observe=lambda m: losses.append(m["loss"]),
        synced_batches=synced_batches,
    )

    def ask() -> None:
        if feed.stalled.wait(60):
            asked.set()
            synced_batches.end_wait()

    asking = threading.Thread(target=ask)
    if here.first:
        asking.start()
    trainer.train()
    saved.wait()
    saved.close()
    if here.first:
        asking.join()
    here.barrier()  # the first rank says which checkpoint is the latest, when it has its own
    return {"stopped": synced_batches.stopped, "losses": losses, "saved": latest(folder)[1].loader}


def looking_ahead(here: Ranks, folder: Path) -> dict:
    """Two epochs with evaluations within them, and a run broken off and taken up again: steps that look ahead, beside
    steps that do not."""
    settings = {"optim": MIXED, "evals": 3}
    plain, once, _ = trained(here, "auto", folder / "plain", ahead=False, **settings)
    ahead, two, _ = trained(here, "auto", folder / "ahead", ahead=True, **settings)
    differ = differing(here, once, two)
    broken, _, trainer = trained(
        here, "auto", folder / "broken", stop_at=4, ahead=True, optim=MIXED
    )
    rest, _, _ = trained(
        here,
        "auto",
        folder / "rest",
        stop_at=4,
        ahead=True,
        optim=MIXED,
        resume=next((folder / "broken").glob("step-*")),
    )
    return {
        "plain": plain,
        "ahead": ahead,
        "differ": differ,
        "at": trainer.meta.loader,
        "broken": broken,
        "rest": rest,
    }


POISON = 3, 3e38
"""The batch of the first epoch that has an extreme value, in the last rank's rows, and the value."""


class PoisonedFeed(FakeFeed):
    def __iter__(self):
        for given in super().__iter__():
            if (given.step, self.rank) == (POISON[0], self.ranks - 1):
                given.dense[5, 1] = POISON[1]
            yield given


class FeedWithoutThat(FakeFeed):
    def __iter__(self):
        return (given for given in super().__iter__() if given.step != POISON[0])


def with_an_extreme_value(here: Ranks, folder: Path) -> dict:
    """A run that leaves a batch out, beside one that never gets it, and what a run that stops there says on each rank.
    With tables that are cut and steps that look ahead, and with copies and steps that do not."""
    outcome: dict = {"differ": [], "said": [], "skipped": []}
    for how, ahead in (("row", True), ("data", False)):
        base, settings = (
            folder / f"{how}-{ahead}",
            {"ahead": ahead, "model": ModelConfig(kind="dcn", **SMALL)},
        )
        losses, left_out, trainer = trained(
            here, how, base / "a", feed=PoisonedFeed, on_nonfinite="skip", **settings
        )
        expected, two, _ = trained(here, how, base / "b", feed=FeedWithoutThat, **settings)
        outcome["differ"] += differing(here, left_out, two) + [losses] * (losses != expected)
        outcome["skipped"].append([trainer.meta.skipped, trainer.meta.step, trainer.meta.rows])
        try:
            trained(here, how, base / "c", feed=PoisonedFeed, **settings)
        except NotANumber as error:
            outcome["said"] += here.gather_objects(str(error))
        outcome["saved"] = len(list((base / "c").glob("step-*/meta.json")))
    return outcome


def states(parts: TrainingParts, here: Ranks) -> dict[str, torch.Tensor]:
    """The optimisers' states in full: of each table, and of each dense parameter. A rank knows its own tables' only."""
    mine = {}
    for which, optimiser in (("tables", parts.table_states), ("dense", parts.dense)):
        for name, values in optimiser.state_dict()["state"].items():
            for key, value in values.items():
                label = f"{which} {name} {key.rpartition('.')[2]}"
                if hasattr(value, "size"):
                    mine[label] = tuple(value.size()), local_parts(value)
    filled: dict[str, torch.Tensor] = {}
    for theirs in here.gather_objects(mine):
        for label, (size, parts_of_it) in theirs.items():
            fill(filled.setdefault(label, torch.zeros(size)), parts_of_it)
    return filled


def differing(here: Ranks, *pair: TrainingParts) -> list[str]:
    """The weights and states in which two models differ."""
    a, b = (whole_weights(parts.model, here) | states(parts, here) for parts in pair)
    return [k for k in a if not torch.equal(a[k], b[k])]


def against_the_twin(here: Ranks, how: str, folder: Path) -> dict[str, float]:
    """How far training on ranks is from the plain twin: at the start, in losses, and in the weights after it."""
    config, parts = build(here, how, WARM)
    start = first_bias_of(whole_weights(parts.model, here))
    pieces = min(here.ranks, MODEL.width // 4) if how == "column" else 1
    expected, final = twin(start, STEPS, config.optim, pieces)
    losses, parts, _ = trained(
        here, how, folder / f"{Path(how).stem}-{here.ranks}", WARM, stop_at=STEPS
    )
    weights = whole_weights(parts.model, here)
    return {
        "kinds": kinds_of(parts.model),
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "weights": max(largest(v - final[k]) for k, v in weights.items()),
    }


def main(folder: Path) -> None:
    """Ranks as torchrun would start them, but each a fork of this process: seven imports of TorchRec are one."""
    quiet()
    outcomes = {}
    for ranks in (2, 1, 4):
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )  # it takes a free port
        common = {
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        forked = [
            multiprocessing.get_context("fork").Process(
                target=on_rank,
                daemon=True,
                args=(folder, {**common, "RANK": rank, "LOCAL_RANK": rank} if ranks > 1 else {}),
            )
            for rank in range(ranks)
        ]
        for process in forked:
            process.start()
        end = time.monotonic() + _LIMIT_S
        for process in forked:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in forked]
        if any(code != 0 for code in codes):
            for process in forked:
                process.kill()  # one that waits for another rank never ends
            sys.exit(f"{ranks} ranks ended with {codes}; None: not within {_LIMIT_S:g} s")
        outcomes[ranks] = json.loads((folder / f"found-{ranks}.json").read_text())
    print(json.dumps(outcomes))


def on_rank(folder: Path, environment: dict[str, object]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    with world() as here:
        outcomes: dict = {how: against_the_twin(here, how, folder) for how in kinds(here.ranks)}
        if here.ranks < 4:
            outcomes["unsharded"] = {
                f"{name} {how}": against_the_unsharded(here, how, model)
                for name, model in WITH_BAGS.items()
                for how in (("auto", "row") if model.history_table == "target" else KINDS)
            }
            outcomes["padded"] = [
                of_a_padded_batch(here, folder / f"padded-{here.ranks}-{i}", model, ahead=i > 0)
                for i, model in enumerate((MODEL, WITH_BAGS["bags"], WITH_BAGS["dien"]))
            ]
            outcomes["extreme"] = with_an_extreme_value(here, folder / f"extreme-{here.ranks}")
            outcomes |= resumed(here, folder)
        outcomes["recut"] = recut(here, folder)
        if here.ranks < 4:
            outcomes["stalled"] = stopped_in_a_stall(here, folder / f"stalled-{here.ranks}")
            outcomes["ahead"] = looking_ahead(here, folder / f"ahead-{here.ranks}")
        if here.ranks > 1:
            half, _, _ = trained(
                here, "row", folder / f"half-{here.ranks}", wire="fp16", stop_at=STEPS
            )
            full, _, _ = trained(here, "row", folder / f"whole-{here.ranks}", stop_at=STEPS)
            outcomes["half"] = max(abs(a - b) for a, b in zip(half, full, strict=True))
        if here.first:
            (folder / f"found-{here.ranks}.json").write_text(json.dumps(outcomes))


def recut(here: Ranks, folder: Path) -> dict:
    """Two ranks' checkpoints, cut by columns, by rows and not at all, under every sharding: what differs in weights
    and states."""
    outcomes: dict = {}
    fake = FakeSplit([batch(6000 + i, ROWS, here.rank, here.ranks) for i in range(2)])
    for was in ("column", "row", "data"):
        saved = folder / f"recut-{was}"
        if here.ranks == 2:
            _, parts, _ = trained(here, was, saved, stop_at=4)
            quality = judged(parts, fake, here)
            weights, kept = whole_weights(parts.model, here), states(parts, here)
            if here.first:
                torch.save((weights, kept, quality), saved / "whole.pt")
            here.barrier()
        weights, kept, quality = torch.load(saved / "whole.pt", weights_only=True)
        for how in kinds(here.ranks):
            _, parts = build(here, how)
            Checkpoint(next(saved.glob("step-*"))).load(parts, here)
            now, differ = whole_weights(parts.model, here), []
            differ += [k for k in weights if not torch.equal(weights[k], now[k])]
            for key, value in states(parts, here).items():
                before = kept[key]
                if value.shape != before.shape:
                    rows = SIZES[key.split(".")[2]]
                    before = (
                        before.view(-1, rows).mean(0).expand(len(value) // rows, rows).flatten()
                    )
                differ += [key] * (not torch.equal(before, value))
            differ += [
                k for k, v in judged(parts, fake, here).items() if abs(v - quality[k]) > 1e-6
            ]
            outcomes[f"{was} {how}"] = differ
        outcomes[f"{was} unlike"] = sum(
            v.view(2, -1)[0].ne(v.view(2, -1)[1]).any().item()
            for k, v in kept.items()
            if was == "column" and k.startswith("tables")
        )
    # A rank that holds no table at all.
    config = Config(
        data="fake", version=0, batch_size=ROWS, ranks=here.ranks, sharding="table", model=MODEL
    )
    layout = TableLayout(MODEL, TABLES[:1])
    parts_alone = parts_of(
        config,
        layout,
        len(DENSE),
        placed(config, layout.tables, machine(here.ranks, here.ranks)),
        here,
    )
    parts_alone.rates.set_step(0)
    return outcomes


def judged(parts: TrainingParts, split: FakeSplit, here: Ranks) -> dict[str, float]:
    quality = evaluate(parts, split, "fake", here).quality
    return {"auc": quality.auc or 0.0, "logloss": quality.logloss}


def resumed(here: Ranks, folder: Path) -> dict:
    """Runs broken off and taken up again, on the same ranks and, from two ranks' checkpoint, on another number."""
    seen: dict = {}
    wide = {"width": 16, "dense_layers": (8,), "over_layers": (8,), "spread": ("big", "small")}
    runs = {
        "adagrad": {},
        "deepfm": {"optim": MIXED, "model": ModelConfig(kind="deepfm", **wide)},
        "dien": {"optim": MIXED, "model": WITH_BAGS["dien, one table"]},
        **{kind: {"model": replace(MODEL, table_dtype=kind)} for kind in ("fp16", "bf16")},
        "copies": {"optim": replace(MIXED, table_optimiser="adagrad")},
    }
    for name, settings in runs.items():
        base, how = folder / f"{name}-{here.ranks}", "data" if name == "copies" else "auto"
        straight, parts, _ = trained(here, how, base / "a", **settings)
        broken, _, trainer = trained(here, how, base / "b", stop_at=4, **settings)
        saved = next((base / "b").glob("step-*"))
        rest, again, _ = trained(here, how, base / "c", stop_at=4, resume=saved, **settings)
        seen[f"resume_{name}"] = {
            "straight": straight,
            "broken": broken,
            "rest": rest,
            "stopped": trainer.synced_batches.stopped,
            "at": trainer.meta.loader,
        }
        seen[f"equal_{name}"] = not differing(here, parts, again)
        if here.ranks == 1:
            theirs = next((folder / f"{name}-2" / "b").glob("step-*"))
            seen[f"taken_{name}"], _, _ = trained(
                here, "auto", base / "d", stop_at=4, resume=theirs, **settings
            )
    fake = FakeSplit([batch(5000 + i, ROWS, here.rank, here.ranks) for i in range(3)])
    findings = evaluate(parts, fake, "fake", here)
    seen["quality"] = findings.quality.to_dict()
    losses = []
    with torch.no_grad():
        for b in fake.batches:
            logits = parts.model(*parts.layout.features(b))
            losses.append(loss_of(logits, b.label, b.weight).item())
    seen["loss"] = here.sum(torch.tensor(losses, dtype=torch.float64)).mean().item() / here.ranks
    return seen


def on_gpus(folder: Path, kernels: list[str]) -> None:
    """Training with each kernel against the plain twin, steps looking ahead as they do on a GPU."""
    quiet()
    with world() as here:
        outcomes = {}
        for kernel in kernels:
            file = folder / f"{kernel}-{here.rank}.json"
            file.write_text(
                json.dumps({"big": f"row:{kernel}", "mid": f"table:{kernel}", "tiny": "data"})
            )
            outcomes[kernel] = against_the_twin(here, str(file), folder / kernel)
        if here.first:
            print(json.dumps(outcomes))


if __name__ == "__main__":
    if sys.argv[2:]:
        on_gpus(Path(sys.argv[1]), sys.argv[2:])
    else:
        main(Path(sys.argv[1]))
