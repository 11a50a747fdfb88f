"""The agent's numbers: they are nowhere else, what cannot be is refused by name."""

import pytest

from sluice.agent.runtime_settings import RuntimeSettings
from sluice.agent.tuner.settings import TunerSettings
from tests.raises import raises


@pytest.mark.parametrize(
    ("settings", "setting", "bound"),
    [
        (RuntimeSettings, {"enough_items": 0}, "at least 1"),
        (TunerSettings, {"draws": 4.5}, "whole number"),
        (TunerSettings, {"quick_s": 0.0}, "above 0"),
        (RuntimeSettings, {"early_share": 1.2}, "from 0 to 1"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_name(settings, setting, bound):
    with raises(ValueError, *setting, *setting.values(), bound):
        settings(**setting)
