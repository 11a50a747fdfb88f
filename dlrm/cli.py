"""The trainer's command line: its options, and the `Config` that they make, alone or on top of a stored one."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from sluice.agent.runtime import knob_memory
from sluice.dlrm.config import (
    FOLLOWS,
    MISSING,
    MODELS,
    OPTIMISERS,
    PRECISIONS,
    SHARDINGS,
    TABLE_OPTIMISERS,
    TUNINGS,
    WIRES,
    Config,
    ConfigError,
    ModelConfig,
    OptimConfig,
)
from sluice.etl.common.arguments import ArgumentParser
from sluice.etl.spec import code_options
from sluice.ingest import options as wishes
from sluice.ingest.knobs import parse_bytes

# What a resumed run must keep: other values would train another model, or on other rows.
_FIXED = ("batch_size", "seed", "model", "transforms")


class _Parser(ArgumentParser):
    """Raises an exception for a wrong option, so that one rank alone reports it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.explained(message)} (see --help)")


def parse(argv: list[str], description: str | None) -> argparse.Namespace:
    """Reads a command line. Only options that were given are in the result, beside `run`, `resume`, `split_moved`,
    `pause`, `check` and `ranks`."""
    parser = _Parser(prog="sluice train", description=description, argument_default=argparse.SUPPRESS,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    model, optim = ModelConfig(), OptimConfig()
    of = {f.name: f.default for f in fields(Config)}

    def sizes(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(",") if part)

    def names(text: str) -> tuple[str, ...]:
        return tuple(part for part in text.split(",") if part)

    def choices(text: str) -> dict[str, str]:
        pairs = [part.partition("=") for part in text.split(",") if part]
        if not all(name and equals and kind for name, equals, kind in pairs):
            raise argparse.ArgumentTypeError(f"{text!r}: write COLUMN=KIND[:ROWS…], with commas between")
        return {name: kind for name, _, kind in pairs}

    add = parser.add_argument_group("what").add_argument
    add("--data", metavar="TABLE", help="feature table, as etl/job.py writes it (with --resume: the checkpoint's)")
    add("--version", type=int, help="version of it (default: the newest; with --resume: the checkpoint's)")
    add("--run-dir", "--run", dest="run", type=Path, required=True, metavar="DIR",
        help="run folder to make: settings, log, checkpoints, report (--run for short, but not under torchrun, which "
        "takes that for its own)")
    add("--resume", action="store_true", default=False,
        help="go on from the newest checkpoint in DIR, with its settings but for those given now; where there is none, "
        "begin, if --data is given: so the same command starts a run and goes on with it")
    add("--follow", nargs="?", const="epochs", choices=FOLLOWS[1:], help="take up newer versions of the table, with "
        "columns that come and go: `epochs` (or nothing) the newest one at each epoch's end; `parts` one after the "
        "other, training once on what each added, after an evaluation on it")
    add("--follow-wait", type=float, metavar="SECONDS", help="with `parts`: how long to wait for another one at the "
        f"end (default: {of['follow_wait']:g})")
    add("--split-moved", choices=("refuse", "accept"), default="refuse", help="what to do where "
        "the table to go on with tests on rows that were trained on (default: refuse)")
    add("--check", action="store_true", default=False, help="check settings and input, print the plan, train nothing")
    add("--ranks", type=int, default=None, help="with --check: ranks to check for (default: torchrun's, or 1)")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=int, help=f"(default: {of['epochs']})")
    add("--batch-size", type=int, help=f"rows of a global batch (default: {of['batch_size']})")
    add("--seed", type=int, help=f"of first weights and row order (default: {of['seed']})")
    add("--save-every", type=int, metavar="STEPS", help="checkpoint also within epochs (default: after each epoch)")
    add("--keep", type=int, metavar="N", help=f"newest checkpoints to keep, beside the best (default: {of['keep']})")
    add("--log-every", type=int, metavar="STEPS", help=f"(default: {of['log_every']})")
    add("--profile", type=int, metavar="STEPS", help="write a trace of so many steps (from the tenth) into DIR")
    add("--metrics-port", metavar="[HOST:]PORT", help="serve figures for Prometheus, on this machine alone unless HOST "
        "says otherwise; a machine's rank n takes PORT + n (default: none)")
    add("--stall-after", type=float, metavar="SECONDS", help="a rank that stands still for so long is named, and all "
        "end; less where steps are quick: 20 times the slowest of late, but at least 10 s "
        f"(default: {of['stall_after']:g})")
    add("--mllog", action="store_true", help="write MLPerf's log lines into DIR, too")
    add = parser.add_argument_group("optimisers").add_argument
    add("--table-optimiser", choices=TABLE_OPTIMISERS, help=f"within the backward pass (default: "
        f"{optim.table_optimiser})")
    add("--lr", type=float, help=f"of the embedding tables (default: {optim.lr:g})")
    add("--schedule", help="of that rate: constant, or any of warmup=,decay_start=,decay=,power=,floor=,by=step|epoch "
        f"(default: {optim.schedule})")
    add("--dense-optimiser", choices=OPTIMISERS, help=f"(default: {optim.dense_optimiser})")
    add("--dense-lr", type=float, help=f"of the dense layers (default: {optim.dense_lr:g})")
    add("--dense-schedule", metavar="SCHEDULE", help=f"of that rate (default: {optim.dense_schedule})")
    add("--clip", type=float, metavar="LENGTH", help="of the dense layers' gradients together (default: none)")
    add("--table-decay", type=float, metavar="D", help="pull of each vector that is looked up towards 0 "
        f"(default: {optim.table_decay:g})")
    add("--dense-decay", type=float, metavar="D", help=f"the dense optimiser's own (default: {optim.dense_decay:g})")
    add = parser.add_argument_group("model").add_argument
    add("--model", dest="kind", choices=MODELS, help=f"(default: {model.kind})")
    add("--width", type=int, help=f"of every embedding (default: {model.width})")
    add("--table-width", type=int, metavar="N", help="of the tables, a part of --width: vectors are held, sent and "
        "updated so narrow, and repeated to the full width for the tower (default: the full width)")
    add("--dense-layers", type=sizes, metavar="N,N", help=f"hidden layers before the interaction "
        f"(default: {','.join(map(str, model.dense_layers))})")
    add("--over-layers", type=sizes, metavar="N,N", help=f"hidden layers after it "
        f"(default: {','.join(map(str, model.over_layers))})")
    add("--bags", type=choices, metavar="COLUMN=KIND,…", help="how a bag's ids are weighed: sum, mean, sqrt (by the "
        "root of their number) or decay:RATE (the last one most) (default: sum)")
    add("--cross-layers", type=int, metavar="N", help=f"of dcn (default: {model.cross_layers})")
    add("--cross-rank", type=int, metavar="N", help="of dcn's matrices (default: full)")
    add("--cross-experts", type=int, metavar="N", help="low-rank experts of a cross layer (default: 1)")
    add("--history", metavar="COLUMN", help="bags that dien reads as a history, the oldest item first")
    add("--target", metavar="COLUMN", help="item in question, for dien")
    add("--precision", choices=PRECISIONS, help=f"of the dense layers' products (default: {model.precision})")
    add("--compress", type=choices, metavar="COLUMN=KIND,…", help="smaller tables: hash:ROWS, modulo:ROWS, "
        "quotient:ROWS[:add|concat], product:ROWS[:PARTS], or spread (as large, its use even over its rows)")
    add("--sharding", metavar="|".join([*SHARDINGS, "FILE"]),
        help="how tables are spread over ranks; torchrec: as TorchRec's planner has it; FILE: JSON, {table: "
        "KIND[:KERNEL]}, auto for the rest; kinds: row, table, column, table_row (over one host's ranks), on GPUs also "
        "data (a copy on each); kernels on GPUs: fused, uvm (in the host's memory), uvm_caching "
        f"(default: {of['sharding']})")
    add("--wire", choices=WIRES, help=f"what embeddings travel as between ranks (default: {of['wire']})")
    add = parser.add_argument_group("evaluation").add_argument
    add("--evals", type=int, metavar="N", help="evaluations an epoch on the validation split, each with a checkpoint "
        f"(default: {of['evals']})")
    add("--stop-auc", type=float, metavar="AUC", help="end once the validation split reaches it")
    add("--pause-after", dest="pause", type=int, default=None, metavar="N", help="save and leave after so many "
        "evaluations from here on, as at SIGTERM: --resume goes on")
    add("--slices", type=names, metavar="COLUMN,…", help="AUC also for the most frequent ids of these")
    add("--stuck-after", type=int, metavar="STEPS", help="from there on an AUC near 0.5 is a warning that names likely "
        f"causes (default: {of['stuck_after']})")
    group = parser.add_argument_group("input")
    knob_memory.add_options(group)
    add = group.add_argument
    add("--tuning", choices=TUNINGS, help=f"who turns the loader's knobs while it runs (default: {of['tuning']})")
    add("--memory-limit", type=parse_bytes, metavar="BYTES", help="of one rank's loader, for instance 2GiB "
        "(default: what the machine leaves)")
    add("--missing", choices=MISSING, help="dense features that are no finite numbers: an error, or counted and 0 "
        f"(default: {of['missing']})")
    add("--reader", choices=("auto", "petastorm", "arrow"), help=f"(default: {of['reader']})")
    code_options.add_transforms(group)
    wishes.add_options(parser.add_argument_group("errors, stores and faults"))
    code_options.add_options(parser.add_argument_group("code that the table's spec names"))
    return parser.parse_args(argv)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as fields of Config, ModelConfig and OptimConfig. Permission to run a user's code is
    not among them, and is not recorded."""
    others = ("run", "resume", "split_moved", "pause", "check", "ranks", "allow_code", "own_spec")
    return {k: v for k, v in vars(args).items() if k not in others}


def fresh(said: dict[str, Any], **known: Any) -> Config:
    """A new run's settings."""
    return Config(**_nested(said, model=ModelConfig(), optim=OptimConfig(), conditions=wishes.RunOptions()), **known)


def resumed(stored: dict[str, Any], said: dict[str, Any], **known: Any) -> Config:
    """A stored run's settings with those given now; ConfigError if one of them may not change."""
    before = Config.from_dict(stored)
    if "compress" in said:  # what `spread_out` chose when the run began holds beside what is given again
        chosen = {name: kind for name, kind in before.model.compress.items() if kind == "spread"}
        said = {**said, "compress": {**chosen, **said["compress"]}}
    if "://" not in said.get("data", "://"):  # as a fresh run has it from its table: it is read from other folders
        said = {**said, "data": os.path.abspath(said["data"])}
    if said.get("follow", before.follow):  # a version given on the command line is where the run began
        said = {name: value for name, value in said.items() if name != "version"}
    now = replace(before, **_nested(said, model=before.model, optim=before.optim,
                                    conditions=replace(before.conditions, inject="")), **known)
    for name in _FIXED:
        if getattr(before, name) != getattr(now, name):
            raise ConfigError(f"--resume: {name} was {getattr(before, name)!r} and cannot become "
                              f"{getattr(now, name)!r}; start another run for that")
    for name in ("dense_optimiser", "table_optimiser"):
        old, new = getattr(before.optim, name), getattr(now.optim, name)
        if old != new:
            raise ConfigError(f"--resume: the {name.replace('_', ' ')} was {old!r}; its state does not fit {new!r}")
    return now


def _nested(said: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """The given options, each in the part of the settings that it belongs to."""
    left = dict(said)
    for name, part in parts.items():
        parts[name] = replace(part, **{f.name: left.pop(f.name) for f in fields(part) if f.name in left})
    return left | parts
