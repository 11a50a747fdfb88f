"""`tests/raises.py`: a fact is found as a whole word, and an error without it fails the test."""

import pytest

from tests.raises import assert_names, raises


@pytest.mark.parametrize("fact", ["b.parquet", "da", 1, "limits"])
def test_a_fact_that_is_not_named_fails(fact: object) -> None:
    with pytest.raises(AssertionError, match="does not name"):
        assert_names("a.parquet: column 'day' holds 15; give --limit", fact)


def test_raises_asserts_the_type_and_the_facts() -> None:
    with pytest.raises(AssertionError, match="'night'"), raises(ValueError, "night"):
        raise ValueError("column 'day' holds 5")
