"""A tower cut over two devices by what its layers cost, as BaPipe cuts one: two ranks, each with a part of the layers.

    python examples/two_devices.py
    python examples/two_devices.py --width 1024 --layers 8 --micro-batches 8 --steps 20

Each layer is timed alone, forwards and backwards. Of all cuts that one is taken whose step should be the shortest: a
batch goes through as micro-batches, so that the second device works on one while the first does the next. Both ranks
load the same batches, in the same order, from loaders of their own; activations and their gradients go by gloo. Told
are the step foretold and measured, for the cut taken and for the even one, and how far the weights are, after all
steps, from those of one device without micro-batches (aims, fixed beforehand: 1e-6, and 15 %). The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from clicks import COLUMNS, IDS, NUMBERS, Batch, batches_of, planted_clicks
from torch.nn.functional import binary_cross_entropy_with_logits

EMBEDDED = 8
ENTERING = NUMBERS + COLUMNS * EMBEDDED


class Cost(NamedTuple):
    forward: float
    backward: float


class Lookup(torch.nn.Module):
    """Numbers and ids of a batch, side by side [rows, NUMBERS + COLUMNS], as one row of numbers and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(COLUMNS * IDS, EMBEDDED)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        ids = given[:, NUMBERS:].long() + IDS * torch.arange(COLUMNS)
        return torch.cat([given[:, :NUMBERS], self.table(ids).flatten(1)], 1)


def layers_of(width: int, layers: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)  # the same each time
    sizes = [ENTERING, *[width] * layers]
    hidden = [
        torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU())
        for a, b in itertools.pairwise(sizes)
    ]
    return [Lookup(), *hidden, torch.nn.Linear(width, 1)]


def given_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([batch[0], batch[1].T.float()], 1), batch[2].unsqueeze(1).clone()


def costs_of(layers: Sequence[torch.nn.Module], given: torch.Tensor, rounds: int = 5) -> list[Cost]:
    """The seconds of each layer for a micro-batch: the median of some rounds, in processor time of this thread."""
    found = []
    for layer in layers:
        times = []
        for _ in range(rounds):
            entering = given.detach().requires_grad_(layer is not layers[0])
            began = time.thread_time()
            leaving = layer(entering)
            middle = time.thread_time()
            leaving.backward(torch.ones_like(leaving))
            times.append((middle - began, time.thread_time() - middle))
        layer.zero_grad()
        found.append(Cost(*(statistics.median(each) for each in zip(*times, strict=True))))
        given = leaving.detach()
    return found


def step_seconds(costs: Sequence[Cost], cut: int, micro_batches: int) -> float:
    """What a step should take if the first `cut` layers are one device's, by going through it."""
    first, second = (
        Cost(*(sum(each) for each in zip(*part, strict=True)))
        for part in (costs[:cut], costs[cut:])
    )
    done, free, at = [], 0.0, micro_batches * first.forward
    for number in range(
        micro_batches
    ):  # the second device computes a micro-batch, both ways, when it is there
        free = max(free, (number + 1) * first.forward) + sum(second)
        done.append(free)
    for ready in done:  # and the first one goes back when it has sent all
        at = max(at, ready) + first.backward
    return at


class Part:
    """One device's layers. `send` gives the other device a tensor, `receive` takes one of a shape from it."""

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        first: bool,
        send: Callable[[torch.Tensor], None],
        receive: Callable[[Sequence[int]], torch.Tensor],
        rate: float = 0.05,
    ) -> None:
        self.layers, self.first, self._send, self._receive = (
            torch.nn.Sequential(*layers),
            first,
            send,
            receive,
        )
        self._optimizer = torch.optim.SGD(self.layers.parameters(), lr=rate)

    def step(self, batch: Batch, micro_batches: int, width: int) -> None:
        """All micro-batches, then one step on the sum of their gradients. `width`: of a row between the devices."""
        given, clicks = given_of(batch)
        self._optimizer.zero_grad()
        if self.first:
            leaving = []
            for some in given.chunk(micro_batches):
                leaving.append(self.layers(some))
                self._send(leaving[-1].detach())
            for one in leaving:
                one.backward(self._receive(one.shape))
        else:
            for some in clicks.chunk(micro_batches):
                entering = self._receive((len(some), width)).requires_grad_()
                loss = binary_cross_entropy_with_logits(
                    self.layers(entering), some, reduction="sum"
                ) / len(clicks)
                loss.backward()
                self._send(entering.grad)
        self._optimizer.step()


def alone(layers: Sequence[torch.nn.Module], batches: Sequence[Batch], rate: float = 0.05) -> float:
    """The same steps on one device, each of a whole batch: the median of their seconds."""
    whole, times = torch.nn.Sequential(*layers), []
    optimizer = torch.optim.SGD(whole.parameters(), lr=rate)
    for batch in batches:
        began, (given, clicks) = time.perf_counter(), given_of(batch)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(whole(given), clicks).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def rank_main(
    rank: int, made: str, given: argparse.Namespace, cut: int, said: torch.multiprocessing.Queue
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{made}/store-{cut}", rank=rank, world_size=2
    )
    waits: list[torch.distributed.Work] = []
    kept: list[torch.Tensor] = []  # what is on its way

    def send(tensor: torch.Tensor) -> None:
        kept.append(tensor.contiguous())
        waits.append(torch.distributed.isend(kept[-1], 1 - rank))

    def receive(shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty(*shape)
        torch.distributed.recv(tensor, 1 - rank)
        return tensor

    layers, times = layers_of(given.width, given.layers), []
    part = Part(layers[:cut] if rank == 0 else layers[cut:], rank == 0, send, receive)
    for batch in batches_of(Path(made, "clicks"), given.batch_size):
        began = time.perf_counter()
        part.step(batch, given.micro_batches, ENTERING if cut == 1 else given.width)
        while waits:
            waits.pop().wait()
        kept.clear()
        times.append(time.perf_counter() - began)
    said.put(
        (
            rank,
            statistics.median(times),
            {n: p.numpy() for n, p in part.layers.state_dict().items()},
        )
    )
    torch.distributed.destroy_process_group()


def run(made: str, given: argparse.Namespace, cut: int) -> tuple[float, list[torch.Tensor]]:
    """The median step of two ranks, and all weights in order."""
    context = torch.multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, made, given, cut, said)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = sorted((said.get(timeout=300) for _ in ranks), key=lambda one: one[0])
    return max(seconds for _, seconds, _ in found), [
        torch.from_numpy(w) for *_, part in found for w in part.values()
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number in (
        ("--width", 512),
        ("--layers", 6),
        ("--batch-size", 4096),
        ("--micro-batches", 8),
        ("--steps", 12),
    ):
        parser.add_argument(name, type=int, default=number, help="(default %(default)s)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        planted_clicks(Path(made, "clicks"), given.batch_size * given.steps, seed=1)
        batches = batches_of(Path(made, "clicks"), given.batch_size)
        layers = layers_of(given.width, given.layers)
        some, _ = given_of(batches[0])
        costs = costs_of(layers, some[: given.batch_size // given.micro_batches])
        one_s = alone(layers, batches)
        whole = [weight for layer in layers for weight in layer.state_dict().values()]
        told: list[dict[str, float]] = []
        chosen = min(
            range(1, len(costs)), key=lambda cut: step_seconds(costs, cut, given.micro_batches)
        )
        for cut in sorted({chosen, len(layers) // 2}):
            measured, weights = run(made, given, cut)
            apart = max(float((a - b).abs().max()) for a, b in zip(whole, weights, strict=True))
            told.append(
                {
                    "cut after": cut,
                    "foretold ms": 1e3 * step_seconds(costs, cut, given.micro_batches),
                    "measured ms": 1e3 * measured,
                    "apart": apart,
                }
            )
        one = {
            "foretold ms": 1e3 * given.micro_batches * sum(map(sum, costs)),
            "measured ms": 1e3 * one_s,
        }
        print(json.dumps({"chosen": chosen, "one device": one, "cuts": told}))


if __name__ == "__main__":
    main()
