"""The options `--knobs`, `--save-knobs`, `--agent-weights` and `--registry`, the same in all programs."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.common.settings import setting

KNOBS = (
    "STAGE=N workers of it (decode, shuffle, batch, collate, and transforms by their names), fetch=64MiB in flight "
    "from a store, STAGE.backend=thread, process or, with --workers, remote, STAGE.fused=yes (a transform done by the "
    "workers of the one before), read_ahead_bytes=64MiB, prefetch_bytes=32MiB, several with commas between"
)


@dataclass(frozen=True, kw_only=True)
class KnobOptions:
    """The options for a run's first knobs, and for where its best knobs are kept."""

    title = "input"
    knobs: str = setting(
        "",
        f"where the knobs start: {KNOBS}; or a file that --save-knobs wrote",
        metavar="NAME=N,…|FILE",
    )
    save_knobs: str = setting(
        "", "write the best knobs of the run to a file, for --knobs", metavar="FILE"
    )
    agent_weights: str = setting(
        "",
        "the weights by which `auto` chooses, in place of those of the package",
        metavar="FILE",
    )
    registry: str | None = setting(
        None,
        "start where an earlier run on such a machine and schema settled, and keep where "
        "this one does (without a value: in the user's cache)",
        metavar="FOLDER|URI",
        bare="",
    )
