"""What starts without imports that it does not need, and without Python's garbage collector."""

from tests.product import synthesize
from tests.run_program import run_program


def _last_line(code: str) -> str:
    done = run_program("-c", code, check=True)
    return done.stdout.splitlines()[-1]


def test_a_training_imports_without_a_full_collection():
    assert (
        _last_line("""
import gc
from sluice.dlrm import train
seen = []
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
try:
    train.main(["--data", "nowhere", "--run-dir", "nowhere/run"])
except SystemExit as end:
    print(end.code, 2 in seen, gc.isenabled())
""")
        == "2 False True"
    )


def test_a_collector_that_was_off_stays_off():
    assert (
        _last_line("""
import gc
from sluice.common.collector import without_collections
gc.disable()
with without_collections():
    pass
print(gc.isenabled())
""")
        == "False"
    )


def test_a_local_job_does_not_import_pandas_and_leaves_it_usable(tmp_path):
    synthesize(tmp_path / "raw", rows=99)
    assert (
        _last_line(f"""
import sys
from sluice.etl import job
words = "--engine local --spec features/criteo.toml --input {tmp_path}/raw --output {tmp_path}/t"
job.main(words.split())
seen = "pandas" in sys.modules
import pandas, pyarrow
print(seen, pyarrow.Table.from_pandas(pandas.DataFrame([7])).to_pandas().iloc[0, 0])
""")
        == "False 7"
    )
