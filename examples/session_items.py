"""The next item of a session, after Intel's entry to the RecSys Challenge 2022 (SIHG4SR), from features/sessions.toml.

    python examples/session_items.py
    python examples/session_items.py --sessions 50000 --epochs 4

Sessions of JSON lines become a feature table (by Spark, as histories are looked for across rows); a loader gives the
items that a session clicked on before, oldest first, and the item that it clicked on then. The model looks at a session
as at a small graph of two kinds of edges: each item gets what came right before it, and what is in the session at all.
Items' properties, which the entry used as well, are left out. Training has two stages: Adam, then SGD with momentum for
a third of the epochs; beside it stands Adam for as long as both.

The planted structure: each item has five successors, each session a taste; the next item is a successor of the last one
(55 %), one of the session's taste (30 %) or any. Told are the hit rate and the mean reciprocal rank at 20 of the next
item, beside popularity and co-occurrence: what followed the last item, and what stood after the others in sessions.
Rows of the test split are of other sessions. Aim, fixed beforehand: above co-occurrence in both, and the two stages no
worse than Adam alone. The last line is JSON.
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
    """Rows of one split: what was clicked on before, oldest first and filled up in front with 0, and what then."""

    before: torch.Tensor
    then: torch.Tensor


def planted_sessions(path: Path, sessions: int, seed: int) -> None:
    """JSON lines of views, nearly all of them clicks."""
    random, successors = np.random.default_rng(seed), successors_of_all()
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


def successors_of_all() -> np.ndarray:
    return np.random.default_rng(0).integers(0, ITEMS, (ITEMS, SUCCESSORS))


def table_of(folder: Path, sessions: int, seed: int) -> FeatureTable:
    planted_sessions(folder / "sessions.json", sessions, seed)
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


def rows_of(table: FeatureTable, split: str) -> Sessions:
    """All rows of a split with something before them. Ids are one more than the table's, as 0 stands for nothing."""
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
    """Items of a session, passing their vectors on, against all items."""

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


def trained(
    rows: Sessions, items: int, epochs: int, *, stages: int, seed: int, batch_size: int = 256
) -> Model:
    """With two stages the last third of the epochs is SGD's, at a falling rate."""
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


def counted(rows: Sessions, items: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How often each item came; which came right after which; and which came after which in a session."""
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
    """The hit rate and the mean reciprocal rank at 20; equal scores count as half above."""
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
        table = table_of(Path(made), given.sessions, given.seed)
        train, test = rows_of(table, "train"), rows_of(table, "test")
    items = int(max(train.then.max(), train.before.max(), test.then.max(), test.before.max())) + 1
    popular, after, within = counted(train, items)
    cooccurring = after[test.before[:, -1]] + 0.5 * within[test.before].mean(1) + 1e-6 * popular
    found = {
        "popularity": hits(popular.expand(len(test.then), -1), test.then),
        "co-occurrence": hits(cooccurring, test.then),
    }
    for name, stages in (("Adam alone", 1), ("two stages", 2)):
        model = trained(train, items, given.epochs, stages=stages, seed=given.seed)
        with torch.no_grad():
            found[name] = hits(model(test.before), test.then)
    told = {
        name: {"hit rate at 20": round(rate, 4), "MRR at 20": round(mrr, 4)}
        for name, (rate, mrr) in found.items()
    }
    for name, each in told.items():
        print(f"{name}: {each}", file=sys.stderr)
    print(json.dumps({"rows": len(train.then), "tested": len(test.then), **told}))
    return told


if __name__ == "__main__":
    main()
