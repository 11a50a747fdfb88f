"""One Spark session for all tests of this room; it comes up inside the first test that asks for it."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.etl.jobs import session

settings.register_profile("etl", deadline=None)  # timings say nothing on a busy machine
settings.load_profile("etl")


@pytest.fixture(scope="session")
def spark():
    started = session()
    yield started
    started.stop()
