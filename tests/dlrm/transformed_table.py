"""A table and a run whose spec has transforms of its own, for the tests of training and of serving."""

import json
from pathlib import Path

from tests.dlrm import clicks_table
from tests.dlrm.forks import Forks
from tests.dlrm.rig import run_words
from tests.run_program import last_json

MODULE = "tests.ingest.transform_functions"
ROWS = 3000
TRANSFORMS = f"""
[[transform]]
name = "ratio"
function = "{MODULE}:ratio"
inputs = ["I1", "number", "C1", "C5"]
outputs = ["I1", {{name = "ratio", role = "dense"}}, {{name = "pair", role = "sparse", cardinality = 50}},
           {{name = "both", role = "id_list", cardinality = 7}}]
[[transform]]
name = "crossed"
op = "cross"
size = 300
inputs = ["C1", "pair"]
outputs = ["C1xpair"]
[[transform]]
name = "grams"
ops = [{{op = "ngram", size = 2}}, {{op = "hash", size = 40}}]
inputs = ["tags"]
outputs = ["grams"]
"""
SPEC = clicks_table.spec_text(features=clicks_table.FEATURES + TRANSFORMS)
DOUBLED = f"{MODULE}:doubled:I1>I1"


def write(path: Path, forks: Forks) -> None:
    """Makes a table whose spec has transforms, and a run of one epoch over it."""
    clicks_table.write(path / "table", clicks_table.raw_rows(ROWS), text=SPEC)
    more = f"--batch-size 256 --tuning fixed --allow-code {MODULE} --transform {DOUBLED}"
    process = forks.train(*run_words(path, more), tmp=path)
    (path / "trained.json").write_text(json.dumps(last_json(process)))
