"""Measurements in pieces: what is known is not measured again, and a case that failed is."""

from __future__ import annotations

import json

from benchmarks import results
from benchmarks.results import Cases


def test_cases_run_in_processes_of_their_own_until_they_succeed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "mine.py").write_text(
        "import os\ndef twice(n, to):\n    os.makedirs(to)\n    print('said')\n    return {'twice': 2 * n}\n"
    )
    path, to = tmp_path / "cases.jsonl", tmp_path / "made"
    to.mkdir()
    Cases(path).run("first", "mine", "twice", {"n": 2, "to": str(to)})
    to.rmdir()
    for _ in range(2):  # the second time it is known: the folder is there again
        Cases(path).run("first", "mine", "twice", {"n": 2, "to": str(to)})
    failed, done = map(json.loads, path.read_text().splitlines())
    assert "FileExistsError" in failed["error"]
    assert done == {"case": "first", "twice": 4}
    assert capfd.readouterr().out == path.read_text()
