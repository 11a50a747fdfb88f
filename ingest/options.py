"""What a command line says about a loader: functions by name, roles of columns, options of a run."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from sluice.etl.common.errors import UsageError
from sluice.ingest.faults.faults import KINDS, Fault, parse
from sluice.ingest.knobs import format_bytes, parse_bytes
from sluice.ingest.process.child_main import load
from sluice.ingest.read import parquet_files
from sluice.ingest.stages.quarantine import ON_ERROR, ErrorPolicy

if TYPE_CHECKING:
    from sluice.ingest.stages.transform import Function


class ArgumentError(UsageError):
    """Words that say nothing: the message names the option and what would do."""


def function_of(name: str, option: str = "--udf") -> tuple[str, Function]:
    """Returns the stage's name and the function that `module:function` names, found as `python -m` finds modules."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ArgumentError(f"{option} {name!r}: write module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = load(name)
    except TypeError:
        raise ArgumentError(f"{option} {name!r}: {attribute} is no function") from None
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"{option} {name!r}: {error}") from None
    return attribute, function


def roles_of(text: str | None) -> dict[str, list[str]] | None:
    """Parses `--roles`; None: they are guessed."""
    return None if text is None else parquet_files.roles_of(text)


_POLICY = ErrorPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run: those that `add_options` adds to a command line."""

    on_error: str = _POLICY.on_error
    max_quarantined: int = _POLICY.max_rows
    """The most rows of a rank that may be set aside."""
    max_quarantined_rate: float = _POLICY.max_rate
    """The largest share of the rows that a rank has seen that may be set aside, judged once enough were seen."""
    cache: str = ""
    """The cache's folder; empty: no cache."""
    cache_limit: int = 10 * 2**30
    inject: str = ""

    def __post_init__(self) -> None:
        parse(self.inject)  # a fault that cannot be parsed is an error at the start
        try:
            _ = self.policy
        except ValueError as error:
            raise ArgumentError(f"--on-error, --max-quarantined, --max-quarantined-rate: {error}") from None
        if self.cache_limit < 1:
            raise ArgumentError(f"--cache-limit: {self.cache_limit} bytes hold nothing")

    @classmethod
    def of(cls, options: argparse.Namespace) -> RunOptions:
        """The options given on a command line."""
        said = {f.name: getattr(options, f.name, None) for f in fields(cls)}
        return cls(**{name: value for name, value in said.items() if value is not None})

    @property
    def policy(self) -> ErrorPolicy:
        return ErrorPolicy(on_error=self.on_error, max_rows=self.max_quarantined, max_rate=self.max_quarantined_rate)

    @property
    def faults(self) -> tuple[Fault, ...]:
        return parse(self.inject)


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the options without defaults, so that an option that was not given can be told from one that was."""
    wishes = RunOptions()
    add = parser.add_argument
    add("--on-error", choices=ON_ERROR, help="rows that fail: stop, or set them aside with weight 0 (default: "
        f"{wishes.on_error})")
    add("--max-quarantined", type=int, metavar="ROWS", help="with quarantine: the most rows of a rank that may be set "
        f"aside (default: {wishes.max_quarantined})")
    add("--max-quarantined-rate", type=float, metavar="SHARE", help="and the largest share of its rows, judged after "
        f"the first {_POLICY.probation_rows:,} (default: {wishes.max_quarantined_rate:g})")
    add("--cache", metavar="DIR", help="keep what was read from remote files on this disk")
    add("--cache-limit", type=parse_bytes, metavar="BYTES", help="and never more than this (default: "
        f"{format_bytes(wishes.cache_limit)})")
    add("--inject", metavar="FAULT@TIME,…", help="faults on purpose, for instance "
        "kill-worker@30s,stall-store=5s@10s,corrupt@part-0: " + "; ".join(f"{n} {k.what}" for n, k in KINDS.items()))
