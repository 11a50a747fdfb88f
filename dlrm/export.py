"""Exports the dense side of a run's newest checkpoint, for programs without this package, or without Python.

    sluice export run                 run/export/dense.pt2, by torch.export, and export.json, which describes it
    sluice export run --compile       dense-compiled.pt2, too: machine code, by AOTInductor and a C++ compiler

Both are held against the model at several batch sizes before they count. The last line of standard output is one JSON
object: what was written, the largest difference, and what is not in it, with the reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sluice.common.program import run, say
from sluice.common.settings import parse, setting
from sluice.dlrm.checkpoint.meta import check, latest
from sluice.dlrm.options import Config
from sluice.etl.spec.code_options import CodeOptions
from sluice.etl.table.table import FeatureTable

NOT_EXPORTED = {
    "embedding tables": "they are sharded, and too large for one program: look rows up where they are kept, and hand "
    "in the sums of each bag's rows (sluice serve does)",
    "compressed columns": "their parts are looked up and put together before the dense side, see "
    "dlrm/model/table_compression.py",
    "features": "text and vocabularies are no tensors: the spec and the fitted state make them, see "
    "etl/apply/features.py",
}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Which run is exported, and to where."""

    run: Path = setting(help="run folder of dlrm.train", metavar="RUN", positional=True)
    out: Path | None = setting(None, "folder to write into (default: RUN/export)", metavar="DIR")
    compile: bool = setting(False, "also to machine code")
    code: CodeOptions = field(default_factory=CodeOptions)


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(ExportOptions, argv=argv, prog="sluice export", description=__doc__)
    path, meta = latest(args.run / "checkpoints")
    check(path)
    model = Config.from_dict(meta.config).model

    import torch

    from sluice.dlrm.checkpoint.partial_read import CheckpointReader
    from sluice.dlrm.model.towers import tower_of
    from sluice.dlrm.serving.exported import SIZES, Head, compiled, difference, example, exported

    columns = [name for name in meta.columns if name != model.history]
    head = Head(model, len(meta.dense), len(columns)).eval()
    head.tower.load_state_dict(CheckpointReader(path).tower())
    longest = 0
    if model.history:
        fields = FeatureTable.open(
            meta.config["data"],
            meta.version,
            allow_code=args.code.permission,
            transforms=meta.config["transforms"],
        ).fields
        longest = next(f.bag[2] for f in fields if f.name == model.history and f.bag)
    batches = [
        example(model, dense=len(meta.dense), columns=len(columns), longest=longest, rows=n)
        for n in SIZES
    ]
    out = args.out or args.run / "export"
    out.mkdir(parents=True, exist_ok=True)
    program = exported(head, batches[-1])
    torch.export.save(program, out / "dense.pt2")
    largest = difference(head, torch.export.load(out / "dense.pt2").module(), batches)
    say(
        f"{out / 'dense.pt2'}: equal to the model at {', '.join(map(str, SIZES))} rows (largest difference "
        f"{largest:.2g})"
    )
    result: dict[str, Any] = {
        "checkpoint": path.name,
        "written": [str(out / "dense.pt2")],
        "difference": largest,
    }
    if args.compile:
        try:
            result["compiled_difference"] = difference(
                head, compiled(program, out / "dense-compiled.pt2"), batches
            )
            result["written"].append(str(out / "dense-compiled.pt2"))
            say(
                f"{out / 'dense-compiled.pt2'}: as equal (largest difference {result['compiled_difference']:.2g})"
            )
        except Exception as error:  # whatever a compiler may say
            result["not_compiled"] = (
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            )
            say(f"not compiled: {result['not_compiled']}")
    about = {
        "checkpoint": path.name,
        "step": meta.step,
        "model": model.kind,
        "width": model.width,
        "table_width": model.table_width or model.width,
        "dense": list(meta.dense),
        "columns": columns,
        "inputs": list(tower_of(model.kind).inputs),
        "output": "one logit a row; its sigmoid is the probability",
        "not_exported": NOT_EXPORTED,
    }
    (out / "export.json").write_text(json.dumps(about, indent=1) + "\n")
    for what, why in NOT_EXPORTED.items():
        say(f"not in it: {what}: {why}")
    return {**result, "not_exported": list(NOT_EXPORTED)}


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main)


if __name__ == "__main__":
    program()
