"""One Spark session for all tests of this room; it comes up inside the first test that asks for it."""

from pathlib import Path

import pytest

from tests.etl.jobs import session

_SOCKETS = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pyspark 4.1 leaves the sockets through which it collects to the garbage collector, which may meet them later."""
    files = {item.path for item in items if item.get_closest_marker("spark")}
    for item in items:
        if item.path in files and item.path.is_relative_to(_FOLDER):
            item.add_marker(_SOCKETS)


@pytest.fixture(scope="session")
def spark():
    started = session()
    yield started
    started.stop()
