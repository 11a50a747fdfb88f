"""Measurements in pieces: what is known is not measured again, and a case that failed is."""

import json

from benchmarks import results


def test_cases_run_in_processes_of_their_own_until_they_succeed(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    module, path, to = (
        tmp_path / "benchmarks" / "mine.py",
        tmp_path / "cases.jsonl",
        tmp_path / "to",
    )
    module.write_text(
        "import os\ndef make(to):\n    os.makedirs(to)\n    print('said')\n    return {'made': to}\n"
    )
    to.mkdir()
    for _ in range(3):  # the third time it is known: the folder is there again
        results.Cases(path).run("first", "mine", "make", {"to": str(to)})
        if "FileExistsError" in path.read_text().splitlines()[-1]:
            to.rmdir()
    failed, done = map(json.loads, path.read_text().splitlines())
    assert "error" in failed
    assert done == {"case": "first", "made": str(to)}
