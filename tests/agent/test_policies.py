"""The product's policies: the contract of each, and the names that left."""

import pytest

from tests.agent.policy_contract import PolicyContract
from tests.product import PRODUCT, make


@pytest.mark.parametrize("name", PRODUCT)
class TestEachOfTheProducts(PolicyContract):
    """What holds of every policy."""


@pytest.mark.parametrize("name", ["planner", "next"])
def test_a_policy_of_an_earlier_version_is_auto_and_a_line_says_so(name):
    with pytest.warns(FutureWarning, match=f"'{name}' is part of 'auto'"):
        assert make(name).name == "auto"
