"""Trains on all GPUs of a host: NCCL against gloo on CPUs, every kind of table, and the wait for input.

    python -m benchmarks.gpu                            as many ranks as there are GPUs
    python -m benchmarks.gpu --short                    fewer steps and rows: the part of `make test-gpu`
    python -m benchmarks.gpu --device cpu --ranks 2     a dry run of every part without a GPU

Each case trains the same batches twice, from the same first weights: on the devices, and on as many CPU ranks. It
compares the losses of all steps and the two checkpoints. A case passes if the differences are within its tolerances.
Rounding by chance differs between a GPU's kernels and a CPU's, so tables of 16 bits have wider ones.

Then `sluice train` trains on a table whose reads take 20 ms: with one worker a stage, and tuned. The result has
samples/s, the share of time waiting for input, and the GPUs' use by NVML (`pip install nvidia-ml-py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import CASES, compare
from benchmarks.results import ROOT, table
from benchmarks.small_table import small_table
from sluice.common.errors import UsageError
from sluice.common.lines import say
from sluice.common.program import FAILED, run

LOOK_S = 0.2
BEFORE = ("--tuning", "fixed", "--knobs", "fetch=1,decode=1")
AFTER = ("--tuning", "auto")


def launch(ranks: int, device: str, words: list[str]) -> subprocess.Popen[str]:
    """Starts ranks under torchrun. On CPUs they see no GPU, so they use gloo."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return subprocess.Popen(
        [sys.executable, "-m", *torchrun, *words],
        cwd=ROOT,
        env={**os.environ, **hidden},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str], what: str) -> dict[str, Any]:
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{what} ended with {process.returncode}: {out[-1000:]}\n{err[-3000:]}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def run_case(name: str, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    results = {}
    for side, device in (("device", args.device), ("cpu", "cpu")):
        folder = work / side
        folder.mkdir(parents=True)
        words = ["benchmarks.gpu_cases", name, str(folder), str(args.steps), str(args.batch_size)]
        results[side] = result_of(launch(args.ranks, device, words), f"{name} on {device}")
    return compare(name, results["device"], results["cpu"], work)


class GpuUse:
    """The mean use of GPUs while it is open, in per cent. `read(i)` returns that of GPU number i, now."""

    def __init__(self, gpus: int, read: Callable[[int], float], every_s: float = LOOK_S) -> None:
        self._gpus = gpus
        self._read = read
        self._every_s = every_s
        self._ended = threading.Event()
        self._looks: list[float] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> GpuUse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def mean(self) -> float | None:
        """None: there is no GPU, or NVML cannot be read."""
        return statistics.mean(self._looks) if self._looks else None

    def _look(self) -> None:
        while self._gpus and not self._ended.wait(self._every_s):
            try:
                self._looks += [self._read(i) for i in range(self._gpus)]
            except (ImportError, RuntimeError) as error:
                say(f"the GPUs' use is not known: {error}; pip install nvidia-ml-py")
                return


def train_table(words: tuple[str, ...], args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Trains on the table with these options. Returns what the run reports, with the GPUs' use."""
    run_folder = work / words[1]
    given = ["--data", f"latency://20ms/{work / 'table'}", "--run-dir", str(run_folder)]
    sizes = ["--batch-size", str(args.batch_size), "--epochs", str(args.epochs)]
    process = launch(args.ranks, args.device, ["dlrm.train", *given, *sizes, *words])
    with GpuUse(args.ranks if args.device == "cuda" else 0, torch.cuda.utilization) as use:
        trained = result_of(process, f"training with {' '.join(words)}")
    return {key: trained[key] for key in ("samples_per_s", "stall_fraction")} | {
        "gpu_use": use.mean
    }


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to train")
    parser.add_argument("--ranks", type=int, default=0, help="ranks (default: one for each GPU)")
    parser.add_argument("--short", action="store_true", help="fewer steps and rows")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="cases")
    parser.add_argument("--steps", type=int, help="steps of a case (default: 40, or 6 if short)")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows (default: %(default)s)")
    args = parser.parse_args(argv)
    args.steps = args.steps or (6 if args.short else 40)
    args.rows, args.epochs = (40_000, 2) if args.short else (400_000, 4)
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and not gpus:
        raise UsageError(
            f"torch {torch.__version__} sees no NVIDIA GPU; `--device cpu` tries every part without one"
        )
    args.ranks = args.ranks or gpus or 1
    if args.device == "cuda" and args.ranks > gpus:
        raise UsageError(f"--ranks {args.ranks}: there are {gpus} GPUs, and each takes one rank")
    return args


def main(argv: list[str]) -> dict[str, Any]:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        cases = [run_case(name, args, work / str(i)) for i, name in enumerate(args.only)]
        say(table(cases))
        small_table(work / "table", rows=args.rows)
        tuning = {
            name: train_table(words, args, work)
            for name, words in (("before", BEFORE), ("after", AFTER))
        }
        say(table([{"tuning": name, **figures} for name, figures in tuning.items()]))
    names = (
        [torch.cuda.get_device_name(i) for i in range(args.ranks)] if args.device == "cuda" else []
    )
    result = {
        "gpus": names,
        "ranks": args.ranks,
        "torch": torch.__version__,
        "equal": all(case["equal"] for case in cases),
        "cases": cases,
        **tuning,
    }
    if result["equal"]:
        return result
    print(json.dumps(result), flush=True)
    raise SystemExit(FAILED)


if __name__ == "__main__":
    run(main)
