"""The trainer's command line: the options other than a run's settings, and the `Config` that a command line makes,
alone or on top of a stored one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.common.settings import Given, make, read, replaced, setting
from sluice.dlrm.options import Config, ConfigError
from sluice.etl.spec.code_options import CodeOptions

# What a resumed run must keep: other values would train another model, or on other rows.
_FIXED = (
    "batch_size",
    "last",
    "seed",
    "streams",
    "window_rows",
    "sample",
    "model",
    "transforms",
    "transform_spec",
    "predicate",
    "rowgroup_selector",
)


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How a run starts or continues, and when it pauses. No run records these options."""

    title = "what"
    run: Path = setting(
        help="run folder to make: settings, log, checkpoints, report (--run for short, but not under "
        "torchrun, which takes that for its own)",
        flags=("--run-dir", "--run"),
        metavar="DIR",
    )
    resume: bool = setting(
        False,
        "go on from the newest checkpoint in DIR, with its settings but for those given now; "
        "where there is none, begin, if --data is given: so the same command starts a run and goes "
        "on with it",
    )
    split_moved: str = setting(
        "refuse",
        "what to do where the table to go on with tests on rows that were trained on",
        choices=("refuse", "accept"),
    )
    check: bool = setting(False, "check settings and input, print the plan, train nothing")
    ranks: int | None = setting(
        None, "with --check: ranks to check for (default: torchrun's, or 1)", least=1
    )
    ranks_per_host: int | None = setting(
        None,
        "with --check: how many of them share one host's memory and cores (default: all)",
        least=1,
    )
    pause: int | None = setting(
        None,
        "save and leave after so many evaluations from here on, as at SIGTERM: --resume goes on",
        flags=("--pause-after",),
        metavar="N",
        least=1,
    )


def parse(argv: list[str], description: str | None = None) -> Given:
    """Reads a command line. Only options that were given are in the result."""
    return read(
        StartOptions, Config, CodeOptions, argv=argv, prog="sluice train", description=description
    )


def fresh(given: Given, **known: Any) -> Config:
    """Returns a new run's settings."""
    return make(Config, given, **known)


def resumed(stored: dict[str, Any], given: Given, **known: Any) -> Config:
    """Returns a stored run's settings with those given now. Raises ConfigError if one of them may not change."""
    before = Config.from_dict(stored)
    given = {"inject": "", **given}  # a fault happens only in the run that was given it
    if (
        "compress" in given
    ):  # what `spread_out` chose when the run began holds together with what is given again
        chosen = {name: kind for name, kind in before.model.compress.items() if kind == "spread"}
        given["compress"] = {**chosen, **given["compress"]}
    if "://" not in given.get(
        "data", "://"
    ):  # as a fresh run has it from its table: it is read from other folders
        given["data"] = os.path.abspath(given["data"])
    if given.get(
        "follow", before.follow
    ):  # a version given on the command line is where the run began
        given.pop("version", None)
    config = replaced(before, given, **known)
    for name in _FIXED:
        if getattr(before, name) != getattr(config, name):
            raise ConfigError(
                f"--resume: {name} was {getattr(before, name)!r} and cannot become "
                f"{getattr(config, name)!r}; start another run for that"
            )
    for name in ("dense_optimiser", "table_optimiser"):
        old, new = getattr(before.optim, name), getattr(config.optim, name)
        if old != new:
            raise ConfigError(
                f"--resume: the {name.replace('_', ' ')} was {old!r}; its state does not fit {new!r}"
            )
    return config
