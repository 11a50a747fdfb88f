"""Checked by mypy, run by nobody: if mypy could not follow our imports, it would take them for Any, silently, and these
lines would fail."""

from collections.abc import Mapping
from typing import assert_type

from sluice import Knobs
from sluice import Knobs as SameKnobs

assert_type(Knobs().workers, Mapping[str, int])
assert_type(SameKnobs(), Knobs)
