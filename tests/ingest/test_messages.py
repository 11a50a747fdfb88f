"""What another process or host sends is checked before it is believed."""

import pytest

from tests.run_program import last_json, run_program

WAYS = ("to a worker", "from a worker", "to a process", "from a process")


@pytest.mark.parametrize("seed", [1])
def test_a_message_with_any_field_mutated_is_refused_by_name_or_means_arrays_within_its_bytes(seed):
    done = run_program("-m", "tests.ingest.mutated_messages", seed, check=True)
    result = last_json(done)
    assert result["wrong"] == []
    assert all(result["counts"][way] > 300 for way in WAYS), result
    assert all(result["refused"][way] > result["counts"][way] / 2 for way in WAYS), result
