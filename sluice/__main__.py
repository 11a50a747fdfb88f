"""`sluice VERB …` runs every program under one name. `python -m sluice VERB …` does the same."""

from __future__ import annotations

import os
import sys
from importlib import import_module, metadata

VERBS = {
    "etl": ("sluice.etl.job", None, "make a feature table from raw logs, on this machine"),
    "synth": (
        "sluice.etl.__main__",
        "synth",
        "write synthetic raw logs whose best reachable AUC is known",
    ),
    "show": ("sluice.etl.__main__", "show", "say what a feature table holds"),
    "check": (
        "sluice.etl.__main__",
        "check",
        "verify a feature table's files, counts and checksums",
    ),
    "vacuum": (
        "sluice.etl.__main__",
        "vacuum",
        "remove the files that no kept or pinned version needs",
    ),
    "bench": (
        "sluice.ingest.__main__",
        "bench",
        "load a table as a trainer would, and say how fast",
    ),
    "worker": ("sluice.ingest.remote.worker", None, "read row groups for loaders on other hosts"),
    "guess": (
        "sluice.ingest.__main__",
        "guess",
        "look at plain Parquet, and write a spec for it to edit",
    ),
    "doctor": (
        "sluice.ingest.__main__",
        "doctor",
        "say whether this machine and this table are fit for loading",
    ),
    "train": (
        "sluice.dlrm.train",
        None,
        "train a model (on several ranks: torchrun … -m sluice.dlrm.train)",
    ),
    "evaluate": ("sluice.dlrm.evaluate", None, "judge a run's checkpoint on a split"),
    "serve": ("sluice.dlrm.serve", None, "answer requests with a run's model"),
    "plan": ("sluice.dlrm.plan", None, "size a model for a machine that you describe"),
    "explain": (
        "sluice.agent.__main__",
        "explain",
        "tell what a run tuned, why, and what came of it",
    ),
    "report": ("sluice.agent.__main__", "report", "write a run's page again"),
    "learn": (
        "sluice.agent.__main__",
        "learn",
        "go on teaching the agent by what came of runs of your own",
    ),
}
"""Verb → the module that holds its program, the program's own first word if it has several, and what it does."""


def usage() -> str:
    width = max(map(len, VERBS))
    lines = "\n".join(f"  {verb:{width}}  {text}" for verb, (_, _, text) in VERBS.items())
    from sluice.common.text_table import wrapped

    return wrapped(
        f"usage: sluice VERB …\n\n{lines}\n\n`sluice VERB --help` says more. On a cluster, feature tables "
        "are made by `spark-submit etl/job.py …`."
    )


def _print(text: str) -> None:
    """Prints a text. A reader such as `| head` may have stopped reading."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os._exit(1)


def main() -> None:
    """Runs the verb's program as if it had been called by its own name."""
    words = sys.argv[1:]
    if words[:1] == ["--version"]:
        from sluice.common.extras import DISTRIBUTION

        _print(f"sluice {metadata.version(DISTRIBUTION)}\n")
        return
    if not words or words[0] in ("-h", "--help"):
        _print(f"{usage()}\n")
        return
    if words[0] not in VERBS:
        from sluice.common.suggest import nearest

        print(
            f"error: there is no verb {words[0]!r}{nearest(words[0], VERBS)}\n\n{usage()}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    module, first, _ = VERBS[words[0]]
    sys.argv[1:] = [*([first] if first else []), *words[1:]]
    from sluice.common.extras import advice

    try:
        program = import_module(module).program
    except ModuleNotFoundError as error:
        if not (missing := advice(error, words[0])):
            raise
        print(f"error: {missing}", file=sys.stderr)
        raise SystemExit(2) from None
    program()


if __name__ == "__main__":
    main()
