"""The fuzzer of values finds nothing in the code as it is."""

from tests.fuzz import one_value
from tests.fuzz.seeds import seed_of_code


def test_drawn_values_are_the_same_in_every_way(tmp_path):
    begin = seed_of_code()
    for seed in range(begin, begin + 100):
        findings = one_value.try_seed(seed, tmp_path)
        assert findings == [], f"make fuzz SEED={seed} ONLY=one_value"
