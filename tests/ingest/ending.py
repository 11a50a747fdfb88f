"""Programs that test_ends.py ends, in process groups of their own.

python -m tests.ingest.ending hold TABLE     two worker processes hold a batch each, until the test says go
python -m tests.ingest.ending answer TABLE   the same, but that it answers interrupts as our programs do
python -m tests.ingest.ending CODE TABLE     a page's loop; after its fourth batch it waits for the test
"""

import os
import sys
import threading
from pathlib import Path

from sluice import FeatureTable, Knobs, Order, Transform
from sluice.common.program import run
from sluice.ingest.process.stacks import on_signal
from tests.product import BatchLoader


def make_loader(function: str = "shifted") -> BatchLoader:
    return BatchLoader(
        FeatureTable.open(sys.argv[2]),
        batch_size=80,
        order=Order(window_rows=60, last="pad"),
        read_ahead_epochs=1000,
        transforms=[Transform(f"tests.ingest.worker_functions:{function}", "mine")],
        knobs=Knobs(workers={"mine": 2}, backend={"mine": "process"}),
    )


def until_told() -> None:
    with open(Path(os.environ["SLUICE_TEST_DIR"]) / "go", "rb", buffering=0) as pipe:
        pipe.read(1)


def train(batch) -> None:
    print(batch.checksum, flush=True)
    if batch.step == 3 and not position.exists():
        assert loader.pipeline.worker_pids
        until_told()


if __name__ == "__main__":
    os.setsid()
    os.chdir(os.environ["SLUICE_TEST_DIR"])
    if sys.argv[1] in ("hold", "answer"):
        loader = make_loader("hold")
        consumer = threading.Thread(target=lambda: next(iter(loader)), daemon=True)
        with on_signal(loader.pipeline.stacks):
            consumer.start()
            if sys.argv[1] == "hold":
                until_told()
            else:
                run(lambda _: consumer.join() or {}, argv=[])
    else:
        position = Path()  # as the page's loop names it
        exec(sys.argv[1])
