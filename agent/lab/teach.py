"""`python -m sluice.agent.lab.teach`: labels looks of simulated runs, and trains the value network on them.

A label is the result of a fork: each candidate of a look is kept in force in a copy of the simulator. Shards of labels
that exist are kept, so an interrupted run continues. With `--values`, the network of an earlier iteration decides in
the runs, so labels come from the states that its own choices lead to.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.common.lines import say
from sluice.common.program import run as program
from sluice.common.settings import parse, setting

_PIPELINES = 5  # in a shard


@dataclass(frozen=True, kw_only=True)
class ValueTeachingOptions:
    """How the value network is taught, and the file for its weights."""

    title = "what"
    folder: Path = setting(
        Path("build/values"),
        "folder for the labels; a folder for each iteration",
        metavar="FOLDER",
    )
    first: int = setting(0, "first shard", least=0)
    shards: int = setting(2000, "shards of five training pipelines", least=1)
    minutes: float = setting(40.0, "makes no further shard after this time", least=0)
    also: tuple[Path, ...] = setting(
        (), "train on the labels of this folder too", metavar="FOLDER", again=True
    )
    values: Path | None = setting(
        None, "the network of the last iteration (default: the planner decides)", metavar="FILE"
    )
    epochs: float = setting(5.0, "times that a look is trained on; 0 only makes labels", least=0)
    seed: int = setting(0, "decides the first weights")
    out: Path | None = setting(
        None, "weights file (default: values.safetensors in the folder)", metavar="FILE"
    )


class PlannerDecides:
    """The values before the first iteration. Nothing is worth more than staying, and nobody asks them."""

    digest = "planner"
    caution = 0.0

    def values(self, seen: object, candidates: Sequence[object]) -> list[Any]:
        raise AssertionError("the planner decides")


def main(argv: Sequence[str]) -> Mapping[str, Any]:
    options = parse(
        ValueTeachingOptions, argv, "python -m sluice.agent.lab.teach", description=__doc__
    )
    import safetensors  # noqa: F401  fails now, not after an hour

    from sluice.agent.choice.choice import Chooser
    from sluice.agent.choice.value import ValueNetwork
    from sluice.agent.lab.labels import label_shard, read_looks
    from sluice.agent.lab.value_teacher import teach_values
    from sluice.agent.weights import write

    network = None if options.values is None else ValueNetwork.load(options.values)
    policy = Chooser(network or PlannerDecides())
    began = time.monotonic()
    for shard in range(options.first, options.first + options.shards):
        if time.monotonic() - began > 60 * options.minutes:
            say(
                f"{options.minutes:g} minutes are over: the same command goes on with shard {shard}"
            )
            break
        used = time.process_time()
        count = label_shard(
            options.folder / f"shard-{shard:05}.npz",
            range(_PIPELINES * shard, _PIPELINES * (shard + 1)),
            policy,
            values=network is not None,
        )
        say(f"shard {shard}: {count} looks, {time.process_time() - used:.0f} s of a core")
    folders = (options.folder, *options.also)
    paths = [path for folder in folders for path in sorted(folder.glob("*.npz"))]
    looks = read_looks(paths)
    if not options.epochs:
        return {"looks": len(looks), "shards": len(paths)}
    weights, record = teach_values(looks, epochs=options.epochs, seed=options.seed)
    out = options.out or options.folder / "values.safetensors"
    command = shlex.join(["python", "-m", "sluice.agent.lab.teach", *argv])
    write(
        out, weights, {**record, "date": datetime.now(UTC).date().isoformat(), "command": command}
    )
    for verdict in record["held_out"]:
        say(", ".join(f"{name} {value:.4f}" for name, value in verdict.items()))
    return {"looks": len(looks), "weights": str(out), "caution": record["caution"]}


if __name__ == "__main__":
    program(main)
