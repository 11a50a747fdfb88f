"""What the search's benchmark concludes from what it measured."""

from __future__ import annotations

from benchmarks.search import compared


def test_searches_are_compared_over_all_seeds():
    rows = [{"search": name, "seconds": seconds, "processor's": processor_s, "evaluations": evaluations}
            for name, seconds, processor_s, evaluations in [
                ("search 0", 10.0, 8.0, 20), ("plain 0", 50.0, 40.0, 90), ("search 1", 20.0, 12.0, 10),
                ("plain 1", 50.0, 40.0, 60)]]
    assert compared(rows) == {"seconds": 0.3, "processor's": 0.25, "evaluations": 0.2}
    assert compared([{"search": "search 0", "seconds": 1.0, "evaluations": 2}]) == {}
