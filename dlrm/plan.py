"""`sluice plan`: places a model's tables on a described machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import run
from sluice.common.settings import parse, setting
from sluice.dlrm.options import (
    SHARDINGS,
    WIRES,
    Table,
)
from sluice.dlrm.sharding.apply import asked, describe, summary
from sluice.dlrm.sharding.machine import read
from sluice.dlrm.sharding.placement import place
from sluice.dlrm.sharding.shard_sizes import (
    DTYPES,
    STATES,
    DoesNotFit,
    ModelPlacement,
    PlacementError,
    Storage,
    gb,
    step_traffic,
)

_EXAMPLES = """
examples:
  sluice plan --rows 1825000000,1825000000 --width 64 --dtype fp16 --machine 8x80GB
  sluice plan --rows 40000000,39060,17295 --lookups 3,2,1 --width 128 --machine 16x40GB

The last line is JSON: fits, weights_bytes, state_bytes, missing_bytes, each_rank, bytes_per_rank, balance, plan. If the
plan does not fit, the exit code is 2.
"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The tables to place, and the machine."""

    rows: tuple[int, ...] = setting(help="rows of each table", metavar="N,…", least=1)
    width: tuple[int, ...] = setting(
        (16,), "embedding width of each table, or one for all", metavar="W,…", least=1
    )
    lookups: tuple[float, ...] = setting(
        (1,), "ids a sample brings to each table", metavar="L,…", above=0
    )
    dtype: str = setting(
        "fp32", "number type of the weights, as sluice train's --table-dtype", choices=tuple(DTYPES)
    )
    optimiser: str = setting(
        "rowwise_adagrad",
        "optimiser whose state is stored with the weights, in float32",
        choices=tuple(STATES),
    )
    machine: str = setting("8x80GB", "RANKSxMEMORY", metavar="MACHINE")
    sharding: str = setting("auto", "how every table is sharded", choices=SHARDINGS)
    batch_size: int = setting(
        65_536, "global batch whose reads and traffic are counted", metavar="B", least=1
    )
    samples: int = setting(0, "rows of an epoch", metavar="N", least=0)
    streams: int | None = setting(
        None, "streams of the row order, as sluice train's --streams", metavar="S", least=1
    )
    wire: str = setting("fp32", "number type of vectors between ranks", choices=WIRES)


def _by_table(flag: str, numbers: tuple[Any, ...], tables: int) -> tuple[Any, ...]:
    """Returns a number for each table, of which one may be given for all."""
    if len(numbers) not in (1, tables):
        raise UsageError(
            f"{flag}: {len(numbers)} numbers for {tables} tables; give one for all, or one for each"
        )
    return numbers if len(numbers) == tables else numbers * tables


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(PlanOptions, argv, "sluice plan", description=__doc__, epilog=_EXAMPLES)
    machine, rows = read(args.machine), args.rows
    widths = _by_table("--width", args.width, len(rows))
    lookups = _by_table("--lookups", args.lookups, len(rows))
    tables = tuple(
        Table(name=f"t{i}", rows=r, width=w, lookups=n)
        for i, (r, w, n) in enumerate(zip(rows, widths, lookups, strict=True))
    )
    storage = Storage(dtype=args.dtype, optimiser=args.optimiser)
    weights = sum(storage.weights(t.rows, t.width) for t in tables)
    state = sum(storage.state(t.rows, t.width) for t in tables)
    say(
        f"{len(tables)} tables, {sum(t.rows for t in tables):,} rows: {gb(weights)} of {args.dtype} weights, "
        f"{gb(state)} of {args.optimiser} state"
    )
    say(
        f"{machine.ranks} ranks of {gb(machine.memory_bytes)} each, "
        f"{gb(machine.usable_bytes)} of it for tables"
    )
    placed: dict[str, ModelPlacement | PlacementError] = {}
    ways: dict[str, dict[str, Any]] = {}
    for way in SHARDINGS:
        try:
            placement = place(tables, machine, storage, asked(way, tables, machine.ranks))
        except PlacementError as error:
            placed[way] = error
            ways[way] = {"fits": False, "why": str(error)}
            say(f"  {way:<7} no: {error}")
            continue
        placed[way] = placement
        held, read_ = placement.balance
        ways[way] = {
            "fits": True,
            "fullest_rank_bytes": placement.most_bytes,
            "balance": _balance(placement),
        }
        say(
            f"  {way:<7} fits: {gb(placement.most_bytes)} on the fullest rank; largest over mean "
            f"{held:.2f} in bytes, {read_:.2f} in reads"
        )
    chosen = placed[args.sharding]
    result = {
        "fits": isinstance(chosen, ModelPlacement),
        "weights_bytes": weights,
        "state_bytes": state,
        "missing_bytes": chosen.missing if isinstance(chosen, DoesNotFit) else 0,
        "ranks": machine.ranks,
        "usable_bytes": machine.usable_bytes,
        "ways": ways,
    }
    if isinstance(chosen, PlacementError):
        if isinstance(chosen, DoesNotFit):
            print(json.dumps(result), flush=True)  # The error follows, but the figures are useful.
        raise chosen
    say(describe(chosen, tables, machine))
    return {**result, **_describe_chosen(args, tables, chosen)}


def _describe_chosen(
    args: PlanOptions, tables: Sequence[Table], placed: ModelPlacement
) -> dict[str, Any]:
    """Returns where the tables lie. Says and returns what the busiest rank holds, and what it reads and sends in a
    step."""
    from sluice.ingest.row_order import default_streams

    batch = args.batch_size
    streams = args.streams or default_streams(batch)
    rows = batch // min(placed.ranks, streams)
    sent, _ = step_traffic(placed, tables, batch=batch, wire=args.wire)
    holds, vector_bytes = placed.most_bytes, round(max(placed.loads("reads")) * batch)
    steps = -(-args.samples // batch)
    say(
        f"each rank, at most: holds {gb(holds)}; reads {rows:,} rows and {gb(vector_bytes)} of vectors a step; "
        f"sends {gb(sent)} a step, without the dense layers' gradients"
    )
    if args.samples:
        say(f"an epoch of {args.samples:,} rows: {steps:,} steps")
    each_rank = {
        "holds_bytes": holds,
        "reads_a_step": {"vector_bytes": vector_bytes, "rows": rows},
        "sends_a_step": sent,
        "steps": steps,
    }
    return {
        "each_rank": each_rank,
        "bytes_per_rank": placed.loads("bytes"),
        "balance": _balance(placed),
        "plan": summary(placed, tables),
    }


def _balance(placed: ModelPlacement) -> dict[str, float]:
    held, read_ = placed.balance
    return {"bytes": round(held, 4), "reads": round(read_, 4)}


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main)


if __name__ == "__main__":
    program()
