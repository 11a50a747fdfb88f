"""Reads the trainer's command line. `StartOptions` are the options that are not settings of a run. `resumed`
changes the settings of a stored run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.common.settings import Given, read, replaced, setting
from sluice.dlrm.options import Config, ConfigError
from sluice.etl.spec.code_options import CodeOptions

# A resumed run must keep these settings. Other values would train another model, or on other rows.
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
        help="the run folder to make, with settings, log, checkpoints and report (short: --run, but "
        "torchrun has an option of that name, so write --run-dir there)",
        flags=("--run-dir", "--run"),
        metavar="DIR",
    )
    resume: bool = setting(
        False,
        "continue from the newest checkpoint in DIR, with its settings except those given now. "
        "If there is no checkpoint and --data is given, start a new run. So the same command starts "
        "and continues a run",
    )
    split_moved: str = setting(
        "refuse",
        "what to do if the test split of the resumed run's table has rows that the run was trained on",
        choices=("refuse", "accept"),
    )
    check: bool = setting(False, "check settings and input, print the plan, train nothing")
    ranks: int | None = setting(
        None, "with --check: the number of ranks to check for (default: torchrun's, or 1)", least=1
    )
    ranks_per_host: int | None = setting(
        None,
        "with --check: the number of ranks that share one host's memory and cores (default: all)",
        least=1,
    )
    pause: int | None = setting(
        None,
        "save and exit after N more evaluations; --resume continues the run",
        flags=("--pause-after",),
        metavar="N",
        least=1,
    )
    preempt_s: float = setting(
        20.0,
        "the time that a run has after SIGTERM to save; a run that takes longer ends with the checkpoint before",
        flags=("--preempt-seconds",),
        metavar="SECONDS",
        above=0,
    )

    @property
    def goes_on(self) -> bool:
        """Whether the run continues in its run folder. torchrun restarts all ranks after one of them died, and they
        continue from the newest checkpoint."""
        return self.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def parse(argv: list[str], description: str | None = None) -> Given:
    """Reads a command line. Only options that were given are in the result."""
    return read(
        StartOptions, Config, CodeOptions, argv=argv, prog="sluice train", description=description
    )


def resumed(stored: dict[str, Any], given: Given, **known: Any) -> Config:
    """Returns a stored run's settings with those given now. Raises ConfigError if one of them may not change."""
    before = Config.from_dict(stored)
    # A fault is injected only by a command line that names it.
    given = {"inject": "", **given}
    # The columns that `spread_out` chose at the start stay spread, unless `compress` now names them.
    if "compress" in given:
        chosen = {name: kind for name, kind in before.model.compress.items() if kind == "spread"}
        given["compress"] = {**chosen, **given["compress"]}
    # A run records an absolute path, because it may be resumed from another folder.
    if "://" not in given.get("data", "://"):
        given["data"] = os.path.abspath(given["data"])
    # A run that follows its table keeps the version that it has reached. `version` is only for a new run.
    if given.get("follow", before.follow):
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
