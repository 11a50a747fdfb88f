"""A training's imports, and Python's garbage collector."""

from tests.run_program import run_program

_TRAINING = """
import gc
from sluice.dlrm import train
seen = []
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
try:
    train.main(["--data", "nowhere", "--run-dir", "nowhere/run"])
except SystemExit as end:
    print(end.code, 2 in seen, gc.isenabled())
"""
_OFF = """
import gc
from sluice.common.collector import without_collections
gc.disable()
with without_collections():
    pass
print(gc.isenabled())
"""


def _last_line(code: str) -> str:
    done = run_program("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_training_imports_without_a_full_collection() -> None:
    assert _last_line(_TRAINING) == "2 False True"


def test_a_collector_that_was_off_stays_off() -> None:
    assert _last_line(_OFF) == "False"
