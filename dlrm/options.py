"""The trainer's command line: what may be said, and the `Config` that it makes, alone or on top of a stored one."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from dlrm.config import OPTIMISERS, SHARDINGS, TUNINGS, Config, ConfigError, ModelConfig, OptimConfig
from dlrm.meta import Meta
from etl.table import FeatureTable
from ingest.knobs import parse_bytes

# What a resumed run must keep: other values would train another model, or on other rows.
_FIXED = ("batch_size", "seed", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that is known before a process joins the others."""

    run: Path
    config: Config
    table: FeatureTable
    meta: Meta
    """Where the run stands: at its beginning, or at the checkpoint in `resume`."""
    resume: Path | None


class _Parser(argparse.ArgumentParser):
    """Complains by an exception, so that one rank alone reports it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def parse(argv: list[str], description: str | None) -> argparse.Namespace:
    """Only what was said is in the result, beside `run`, `resume`, `check` and `ranks`."""
    parser = _Parser(prog="python -m dlrm.train", description=description, argument_default=argparse.SUPPRESS,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    model, optim = ModelConfig(), OptimConfig()
    of = {f.name: f.default for f in fields(Config)}

    def sizes(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(",") if part)

    add = parser.add_argument_group("what").add_argument
    add("--data", metavar="TABLE", help="feature table, as etl/job.py writes it (with --resume: the checkpoint's)")
    add("--version", type=int, help="version of it (default: the newest; with --resume: the checkpoint's)")
    add("--run-dir", "--run", dest="run", type=Path, required=True, metavar="DIR",
        help="run folder to make: settings, log, checkpoints, report (--run for short, but not under torchrun, which "
        "takes that for its own)")
    add("--resume", action="store_true", default=False,
        help="go on from the newest checkpoint in DIR, with its settings but for those given now")
    add("--check", action="store_true", default=False, help="check settings and input, print the plan, train nothing")
    add("--ranks", type=int, default=None, help="with --check: ranks to check for (default: torchrun's, or 1)")
    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=int, help=f"(default: {of['epochs']})")
    add("--batch-size", type=int, help=f"rows of a global batch (default: {of['batch_size']})")
    add("--seed", type=int, help=f"of first weights and row order (default: {of['seed']})")
    add("--lr", type=float, help=f"of the embedding tables, row-wise Adagrad (default: {optim.lr:g})")
    add("--dense-lr", type=float, help=f"of the dense layers (default: {optim.dense_lr:g})")
    add("--dense-optimiser", choices=OPTIMISERS, help=f"(default: {optim.dense_optimiser})")
    add("--width", type=int, help=f"of every embedding (default: {model.width})")
    add("--dense-layers", type=sizes, metavar="N,N", help=f"hidden layers before the interaction "
        f"(default: {','.join(map(str, model.dense_layers))})")
    add("--over-layers", type=sizes, metavar="N,N", help=f"hidden layers after it "
        f"(default: {','.join(map(str, model.over_layers))})")
    add("--sharding", metavar="|".join([*SHARDINGS, "FILE"]),
        help="how tables are spread over ranks; FILE: JSON, {column: row|table|column}, auto for the rest "
        f"(default: {of['sharding']})")
    add("--save-every", type=int, metavar="STEPS", help="checkpoint also within epochs (default: after each epoch)")
    add("--log-every", type=int, metavar="STEPS", help=f"(default: {of['log_every']})")
    add = parser.add_argument_group("input").add_argument
    add("--tuning", choices=TUNINGS, help=f"who turns the loader's knobs while it runs (default: {of['tuning']})")
    add("--knobs", metavar="NAME=N,…", help="knobs to start with, for instance read=2,prefetch_bytes=64MiB")
    add("--memory-limit", type=parse_bytes, metavar="BYTES", help="of one rank's loader, for instance 2GiB "
        "(default: what the machine leaves)")
    add("--reader", choices=("petastorm", "arrow"), help=f"(default: {of['reader']})")
    return parser.parse_args(argv)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """What was said, as fields of Config, ModelConfig and OptimConfig."""
    return {k: v for k, v in vars(args).items() if k not in ("run", "resume", "check", "ranks")}


def fresh(said: dict[str, Any], **known: Any) -> Config:
    """A new run's settings."""
    return Config(**_nested(said, ModelConfig(), OptimConfig()), **known)


def resumed(stored: dict[str, Any], said: dict[str, Any], **known: Any) -> Config:
    """A stored run's settings with those said now; ConfigError if one of them may not change."""
    before = Config.from_dict(stored)
    now = replace(before, **_nested(said, before.model, before.optim), **known)
    for name in _FIXED:
        if getattr(before, name) != getattr(now, name):
            raise ConfigError(f"--resume: {name} was {getattr(before, name)!r} and cannot become "
                              f"{getattr(now, name)!r}; start another run for that")
    if before.optim.dense_optimiser != now.optim.dense_optimiser:
        raise ConfigError(f"--resume: the dense optimiser was {before.optim.dense_optimiser!r}; its state does not fit "
                          f"{now.optim.dense_optimiser!r}")
    return now


def _nested(said: dict[str, Any], model: ModelConfig, optim: OptimConfig) -> dict[str, Any]:
    parts = {}
    for name, part in (("model", model), ("optim", optim)):
        own = {f.name for f in fields(part)}
        parts[name] = replace(part, **{k: said[k] for k in own & said.keys()})
    own = {f.name for f in fields(ModelConfig)} | {f.name for f in fields(OptimConfig)}
    return {**{k: v for k, v in said.items() if k not in own}, **parts}
