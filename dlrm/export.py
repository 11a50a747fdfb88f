"""Exports the dense side of a run's newest checkpoint, for programs without this package, or without Python.

    sluice export run              run/export/dense.pt2 by torch.export, described by export.json
    sluice export run --compile    also dense-compiled.pt2: machine code by AOTInductor and C++

Both programs are compared with the model at several batch sizes. The last line of standard output is one JSON object:
the files, the largest difference, and the parts that are not exported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sluice.common.program import run, say
from sluice.common.settings import parse, setting
from sluice.etl.spec.code_options import CodeOptions

if TYPE_CHECKING:
    from sluice.dlrm.checkpoint.meta import CheckpointMeta
    from sluice.dlrm.options import ModelConfig


NOT_EXPORTED = {
    "embedding tables": "they are sharded, and too large for one program: look rows up where they are kept, and pass "
    "the sums of each bag's rows (as sluice serve does)",
    "compressed columns": "their ids become rows before the dense side, see dlrm/model/table_compression.py",
    "features": "text and vocabularies are not tensors: the spec and the fitted state make the features, see "
    "etl/apply/features.py",
}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The run to export, and the folder to write into."""

    run: Path = setting(help="run folder of dlrm.train", metavar="RUN", positional=True)
    out: Path | None = setting(None, "folder to write into (default: RUN/export)", metavar="DIR")
    compile: bool = setting(False, "also to machine code")
    code: CodeOptions = field(default_factory=CodeOptions)


def main(argv: list[str]) -> dict[str, Any]:

    args = parse(ExportOptions, argv, "sluice export", description=__doc__)

    from sluice.dlrm.checkpoint.meta import check, latest
    from sluice.dlrm.options import Config

    path, meta = latest(args.run / "checkpoints")
    check(path)
    model = Config.from_dict(meta.config).model

    import torch

    from sluice.dlrm.checkpoint.partial_read import CheckpointReader
    from sluice.dlrm.model.towers import tower_of
    from sluice.dlrm.serving.exported import SIZES, Head, difference, example, exported

    columns = [name for name in meta.columns if name != model.history]
    head = Head(model, len(meta.dense), len(columns)).eval()
    head.tower.load_state_dict(CheckpointReader(path).tower())
    longest = _longest_history(args, meta, model)
    batches = [
        example(model, dense=len(meta.dense), columns=len(columns), longest=longest, rows=n)
        for n in SIZES
    ]
    out = args.out or args.run / "export"
    out.mkdir(parents=True, exist_ok=True)
    program = exported(head, batches[-1])
    target = out / "dense.pt2"
    torch.export.save(program, target)
    largest = difference(head, torch.export.load(target).module(), batches)
    say(
        f"{target}: equal to the model at {', '.join(map(str, SIZES))} rows (largest difference "
        f"{largest:.2g})"
    )
    result: dict[str, Any] = {
        "checkpoint": path.name,
        "written": [str(target)],
        "difference": largest,
    }
    if args.compile:
        _compile(program, out / "dense-compiled.pt2", head, batches, result)
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
        say(f"not exported: {what}: {why}")
    return {**result, "not_exported": list(NOT_EXPORTED)}


def _longest_history(args: ExportOptions, meta: CheckpointMeta, model: ModelConfig) -> int:
    from sluice.etl.table.table import FeatureTable

    if not model.history:
        return 0
    fields = FeatureTable.open(
        meta.config["data"],
        meta.version,
        allow_code=args.code.permission,
        transforms=meta.config["transforms"],
    ).fields
    return next(f.bag[2] for f in fields if f.name == model.history and f.bag)


def _compile(program: Any, target: Path, head: Any, batches: Any, result: dict[str, Any]) -> None:
    """Compiles the program and adds the outcome to the result. An error is reported and not raised."""
    from sluice.dlrm.serving.exported import compiled, difference

    try:
        largest = difference(head, compiled(program, target), batches)
    except Exception as error:  # Compilers raise many types of errors.
        first_line, *_ = str(error).splitlines() or [""]
        result["not_compiled"] = f"{type(error).__name__}: {first_line}"
        say(f"not compiled: {result['not_compiled']}")
        return
    result["compiled_difference"] = largest
    result["written"].append(str(target))
    say(f"{target}: equal to the model, too (largest difference {largest:.2g})")


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main)


if __name__ == "__main__":
    program()
