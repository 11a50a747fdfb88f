"""`sluice VERB …` runs every program under one name. `python -m sluice VERB …` does the same."""

from __future__ import annotations

import sys
from importlib import import_module, metadata

_ETL = "sluice.etl.__main__"
_INGEST = "sluice.ingest.__main__"
_AGENT = "sluice.agent.__main__"
PATH: dict[str, dict[str, tuple[str, str]]] = {
    "from logs to a feature table": {
        "guess": (_INGEST, "look at plain Parquet or text logs, and write a spec to edit"),
        "etl": ("sluice.etl.job", "make a feature table from raw logs, on this machine"),
        "synth": (_ETL, "write synthetic raw logs whose best reachable AUC is known"),
        "show": (_ETL, "say what a feature table holds"),
        "check": (_ETL, "verify a feature table's files, counts and checksums"),
        "vacuum": (_ETL, "remove the files that no kept or pinned version needs"),
        "forget": (
            _INGEST,
            "remove one user, or another value, from a table and its runs",
        ),
    },
    "loading": {
        "bench": (
            _INGEST,
            "load a table as a trainer would: how fast, and what would help",
        ),
        "doctor": (
            _INGEST,
            "check whether this machine and this table are fit for loading",
        ),
        "pack": (_INGEST, "rewrite Parquet so that a loader reads it fastest"),
        "worker": (
            "sluice.ingest.remote.worker",
            "read row groups for loaders on other hosts",
        ),
    },
    "training and serving": {
        "train": (
            "sluice.dlrm.train",
            "train a model (on several ranks: torchrun … -m sluice.dlrm.train)",
        ),
        "evaluate": ("sluice.dlrm.evaluate", "judge a run's checkpoint on a split"),
        "serve": ("sluice.dlrm.serve", "answer requests with a run's model"),
        "plan": ("sluice.dlrm.plan", "size a model for a machine that you describe"),
    },
    "what a run did": {
        "explain": (_AGENT, "tell what a run tuned, why, and what came of it"),
        "report": (_AGENT, "write a run's page again"),
    },
}
"""The verbs in the order in which a user needs them, by what they are for: the module of the program, and what it does.
A program named `__main__` has several verbs."""
VERBS = {verb: program for verbs in PATH.values() for verb, program in verbs.items()}


def usage() -> str:
    width = max(map(len, VERBS))
    groups = "\n\n".join(
        "\n".join([f"{title}:", *(f"  {verb:{width}}  {verbs[verb][1]}" for verb in verbs)])
        for title, verbs in PATH.items()
    )
    return (
        f"usage: sluice VERB …\n\n{groups}\n\n`sluice VERB --help` says more. On a cluster, feature tables are "
        "made by `spark-submit etl/job.py …`."
    )


def main() -> None:
    """Runs the verb's program as if it had been called by its own name."""
    from sluice.common.program import run

    words = sys.argv[1:]
    if not words or words[0] not in VERBS:
        run(_answer)
    module, _ = VERBS[words[0]]
    sys.argv[1:] = words if module.endswith("__main__") else words[1:]
    try:
        program = import_module(module).program
    except ModuleNotFoundError as error:
        missing = error

        def fail(_words: list[str]) -> None:
            raise missing

        run(fail, argv=words)
    program()


def _answer(words: list[str]) -> None:
    """Answers a command line without a verb."""
    from sluice.common.errors import UsageError
    from sluice.common.extras import DISTRIBUTION
    from sluice.common.program import command_of

    if words[:1] == ["--version"]:
        print(f"sluice {metadata.version(DISTRIBUTION)}")
    elif verb := command_of(words, VERBS, usage()):
        raise UsageError(f"write the options of {verb!r} after it")


if __name__ == "__main__":
    main()
