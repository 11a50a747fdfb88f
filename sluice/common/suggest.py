"""Suggests the nearest existing name in messages. Standard library only, because every package uses this file."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any, Self

_LEFT = {
    "audit": "flip the label of some rows of a sample, make a table from both, and compare the features of these rows",
    **dict.fromkeys(("arrow", "arrow_udf"), "use Transform(function, name, reads=…, gives=…)"),
    "bags": "the vectors of a row's ids are added up; use `--model dien`, or your own loop over sluice.Loader",
    **dict.fromkeys(
        ("cache", "cache_limit"),
        "`sluice doctor` needs none; for a bucket, mount it with a cache (mount-s3 --cache DIR), and read that folder",
    ),
    "columns": "name the columns that a Transform reads as reads=…, and those of a Loader in roles=…",
    "compress": "give the operator hash in the spec a smaller size",
    "cross_experts": "use --cross-rank",
    "explain": "run the spec on some lines with another --output; the job says how it meets each vocabulary",
    "export": "docs/serving.md shows how torch.export writes the dense layers of a run",
    "follow_wait": "start the run again with --resume",
    "for": "compare tables with and without `online = true` by `sluice bench`",
    "format": "pyarrow.csv converts the lines",
    "headroom": "use `sluice bench TABLE --step-ms MS`, or `sluice.report(loader, step)` with your own step",
    "html": "`sluice show` prints the same figures",
    "json": "the last line of the output is JSON, always",
    **dict.fromkeys(
        ("learn", "teach"),
        "use `python -m sluice.agent.lab.teach` in a checkout, and pass its weights as --agent-weights",
    ),
    "live": "run `sluice report RUN` while the run lasts, or give it --metrics-port",
    "measure_rows": "compare the answers of `--tables int8` with those of `--tables fp32`",
    "missing": "use the operator fill in the spec",
    "mllog": "the run folder has events.jsonl and metrics.jsonl",
    **dict.fromkeys(
        ("packed", "packed_folder", "rowgroup_cache"), "the files themselves are read faster now"
    ),
    "picture": "report.html has the charts",
    "place": "write online = true at the operators that a loader shall apply",
    "policies": "use `python -m sluice.agent.lab.policies` in a checkout",
    **dict.fromkeys(
        ("predicate", "rowgroup_selector"),
        "use [[filter]] in the spec, or in your own loop PetastormOptions(predicate=…) or a list of files",
    ),
    "profile": "use py-spy or nsys",
    "rate": "a proxy limits rates (docs/serving.md)",
    "replay": "compare policies by `sluice bench --tuning POLICY`",
    "sample": "give the column the role weight, so that it weighs the loss of each row",
    "schema": "name the columns in roles=…, or give a spec",
    "shape": "features/avazu.toml, sessions.toml and wide.toml are examples of other rows",
    "simulate": "use `python -m sluice.agent.lab.simulate` in a checkout",
    **dict.fromkeys(
        ("sluice plan --allow-code", "sluice plan --data", "sluice plan --spec"),
        "give the tables' sizes, which `sluice show TABLE` prints, as --rows",
    ),
    "slices": "score rows with the server, and group them by the column",
    "step_threads": "leave it out; whole runs were 1.04 times as fast at most",
    "table_width": "use --width",
    "transform_spec": "use operators of the spec, or --transform, or in your own loop transforms=[TransformSpec(…)]",
    "Transform memory_limit": "the function may limit its own process by resource.setrlimit",
    "udf": "use --transform",
}
"""A verb, an option or an argument of an earlier version → what to do instead. A name that means
something elsewhere follows its program or its class."""


def left(name: str) -> str:
    """Returns the end of a message about a verb, an option or an argument that Sluice had: what to do instead. Empty:
    Sluice did not have it. The name may follow a program or a class: `sluice plan --data`, `Transform memory_limit`."""
    word = name.rpartition(" ")[2].lstrip("-")
    instead = _LEFT.get(name) or _LEFT.get(word.replace("-", "_"))
    return f", which was in an earlier version: {instead}" if instead else ""


def meant(name: object, known: Collection[str]) -> str:
    """Returns the end of a message about a name or a value: ` (did you mean 'clip'?)`, or nothing. A part of an object
    (`geo.country`) is meant by the object's name."""
    parts = [path for path in known if path.startswith(f"{name}.")]
    close = parts or difflib.get_close_matches(str(name), known, 1, 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nearest(name: object, known: Collection[str]) -> str:
    """Returns the end of a message about a name: the one that may have been meant, or the names to choose from."""
    return meant(name, known) or f" (known: {', '.join(sorted(known)) or 'none'})"


class NamedFields:
    """A base of dataclasses that users write. An unknown argument raises a TypeError with the most similar field."""

    __slots__ = ()

    def __new__(cls, *_: Any, **given: Any) -> Self:
        known = vars(cls)["__dataclass_fields__"]
        for name in given.keys() - known.keys():
            raise TypeError(
                f"{cls.__name__} has no argument {name!r}{left(f'{cls.__name__} {name}') or nearest(name, known)}"
            )
        return super().__new__(cls)
