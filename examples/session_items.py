"""Predicts the next item of a session, with features/sessions.toml. The model follows Intel's entry to the RecSys
Challenge 2022 (SIHG4SR).

    python examples/session_items.py
    python examples/session_items.py --sessions 50000 --epochs 4

A Spark job makes a feature table of the sessions, which are JSON lines. A loader returns the earlier clicks of a
session, oldest first, and the item of the next click. The model treats a session as a small graph with two kinds of
edges: each item gets information from the item right before it, and from all items of the session. It does not use
properties of the items, unlike the entry. Training has two stages: Adam, and then SGD with momentum for a third of the
epochs. For comparison, another model trains with Adam for all epochs.

The sessions are synthetic. Each item has five successors, and each session has a taste. The next item is a successor of
the last one (55 %), an item of the session's taste (30 %), or any item. The test split has other sessions than the
training split.

The last line is JSON: the hit rate and the mean reciprocal rank (MRR) of the next item among the first 20, for both
models, for popularity, and for co-occurrence, which counts what followed an item directly or later in a session. The
aims were fixed before the measurement: more than co-occurrence in both measures, and two stages no worse than Adam.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from sluice import FeatureTable, Loader, Order

ITEMS, TASTES, SUCCESSORS, LONGEST, TOP = 400, 20, 5, 20, 20
FOLLOWS, TASTED = 0.55, 0.30
SPEC = Path(__file__).resolve().parent.parent / "features" / "sessions.toml"
GENRES = ("drama", "comedy", "crime", "war", "music")


class Sessions(NamedTuple):
    """The rows of a split: the earlier items, oldest first and padded with 0 in front, and the next item."""

    before: torch.Tensor
    then: torch.Tensor


def write_sessions(path: Path, sessions: int, seed: int) -> None:
    """Writes synthetic sessions as JSON lines."""
    random, successors = np.random.default_rng(seed), draw_successors()
    with path.open("w") as file:
        for session in range(sessions):
            taste, at, item = int(random.integers(TASTES)), 1_760_000_000 + 100_000 * session, None
            for _ in range(int(random.integers(4, 10))):
                chance = random.random()
                if item is not None and chance < FOLLOWS:
                    item = int(random.choice(successors[item]))
                elif chance < FOLLOWS + TASTED:
                    item = taste + TASTES * int(ITEMS // TASTES * random.random() ** 2)
                else:
                    item = int(ITEMS * random.random() ** 2)
                at += int(random.integers(5, 60))
                file.write(
                    json.dumps(
                        {
                            "user": f"s{session}",
                            "item": f"i{item}",
                            "at": at,
                            "zone": "Europe/Berlin",
                            "tags": [f"tag{item % 50}"],
                            "liked_tags": [f"tag{taste}"],
                            "price": 1.0,
                            "click": 1,
                            "genres": GENRES[item % TASTES % 5],
                        }
                    )
                    + "\n"
                )


def draw_successors() -> np.ndarray:
    return np.random.default_rng(0).integers(0, ITEMS, (ITEMS, SUCCESSORS))


def make_table(folder: Path, sessions: int, seed: int) -> FeatureTable:
    write_sessions(folder / "sessions.json", sessions, seed)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "sluice",
            "etl",
            "--engine",
            "spark",
            "--spec",
            SPEC,
            "--input",
            folder / "sessions.json",
            "--output",
            folder / "table",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return FeatureTable.open(str(folder / "table"))


def load_rows(table: FeatureTable, split: str) -> Sessions:
    """Returns the rows of a split with an earlier click. Ids are one more than in the table, because 0 is the
    padding."""
    before, then = [], []
    with Loader(
        table, batch_size=512, split=split, order=Order(shuffle=False, last="pad"), tuning="fixed"
    ) as loader:
        for batch in loader:
            clicked = batch["clicked"]
            for bag, item, weight in zip(
                torch.split(clicked.values, clicked.lengths.tolist()),
                batch["item"],
                batch.weight,
                strict=True,
            ):
                if len(bag) and weight > 0:
                    before.append(
                        torch.nn.functional.pad(bag[-LONGEST:].long() + 1, (LONGEST - len(bag), 0))
                    )
                    then.append(int(item) + 1)
    return Sessions(torch.stack(before), torch.tensor(then))


class Model(torch.nn.Module):
    """Scores all items as the next one of a session."""

    def __init__(self, items: int, width: int = 64) -> None:
        super().__init__()
        self.items, self.next = (torch.nn.Embedding(items, width, padding_idx=0) for _ in range(2))
        self.places = torch.nn.Embedding(LONGEST, width)
        self.steps, self.together = (torch.nn.Linear(width, width, bias=False) for _ in range(2))
        self.weigh = torch.nn.Linear(2 * width, 1)
        self.last, self.popular = torch.nn.Linear(width, width), torch.nn.Embedding(items, 1)
        for table in (self.items, self.next, self.places, self.popular):
            torch.nn.init.normal_(table.weight, std=0.1)

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        vectors, there = self.items(before), (before > 0).unsqueeze(2)
        came = torch.nn.functional.pad(vectors[:, :-1], (0, 0, 1, 0))
        mean = (vectors * there).sum(1, keepdim=True) / there.sum(1, keepdim=True)
        vectors = vectors + torch.tanh(self.steps(came) + self.together(mean))
        last = vectors[:, -1]
        weight = self.weigh(
            torch.cat([vectors + self.places.weight, last.unsqueeze(1).expand_as(vectors)], 2)
        )
        weight = weight.masked_fill(~there, -torch.inf).softmax(1)
        session = (weight * vectors).sum(1) + self.last(last)
        return session @ self.next.weight.T + self.popular.weight.T


def train_model(
    rows: Sessions, items: int, epochs: int, *, stages: int, seed: int, batch_size: int = 256
) -> Model:
    """Returns a trained model. With two stages, SGD trains the last third of the epochs, otherwise Adam trains all."""
    torch.manual_seed(seed)
    model, first = Model(items), epochs if stages == 1 else max(1, epochs - max(1, epochs // 3))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        if epoch == first:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for some in torch.randperm(len(rows.then)).split(batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(rows.before[some]), rows.then[some]).backward()
            optimizer.step()
    return model


def count_pairs(rows: Sessions, items: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns how often each item was next, how often it followed each item directly, and how often it came later."""
    popular = torch.bincount(rows.then, minlength=items).float()
    after, within = torch.zeros(items, items), torch.zeros(items, items)
    after.index_put_((rows.before[:, -1], rows.then), torch.ones(len(rows.then)), accumulate=True)
    for place in range(LONGEST):
        within.index_put_(
            (rows.before[:, place], rows.then), torch.ones(len(rows.then)), accumulate=True
        )
    within[0] = 0
    return (
        popular,
        after / after.sum(1, keepdim=True).clamp_min(1),
        within / within.sum(1, keepdim=True).clamp_min(1),
    )


def hits(scores: torch.Tensor, then: torch.Tensor) -> tuple[float, float]:
    """Returns the hit rate and the mean reciprocal rank at 20. Of the items with an equal score, half rank higher."""
    own = scores.gather(1, then.unsqueeze(1))
    ranks = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    return float((ranks <= TOP).double().mean()), float(((ranks <= TOP) / ranks).double().mean())


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in (("--sessions", 5000), ("--epochs", 6), ("--seed", 1)):
        parser.add_argument(name, type=int, default=number, help="(default %(default)s)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        table = make_table(Path(made), given.sessions, given.seed)
        train, test = load_rows(table, "train"), load_rows(table, "test")
    items = int(max(train.then.max(), train.before.max(), test.then.max(), test.before.max())) + 1
    popular, after, within = count_pairs(train, items)
    cooccurring = after[test.before[:, -1]] + 0.5 * within[test.before].mean(1) + 1e-6 * popular
    found = {
        "popularity": hits(popular.expand(len(test.then), -1), test.then),
        "co-occurrence": hits(cooccurring, test.then),
    }
    for name, stages in (("Adam alone", 1), ("two stages", 2)):
        model = train_model(train, items, given.epochs, stages=stages, seed=given.seed)
        with torch.no_grad():
            found[name] = hits(model(test.before), test.then)
    results = {
        name: {"hit rate at 20": round(rate, 4), "MRR at 20": round(mrr, 4)}
        for name, (rate, mrr) in found.items()
    }
    for name, result in results.items():
        print(f"{name}: {result}", file=sys.stderr)
    print(json.dumps({"rows": len(train.then), "tested": len(test.then), **results}))
    return results


if __name__ == "__main__":
    main()
