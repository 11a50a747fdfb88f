"""Checked by mypy, run by nobody: if mypy could not follow our imports, it would take them for Any, silently, and these
lines would fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_type

from sluice import Knobs as SameKnobs
from sluice.ingest.knobs import Knobs

assert_type(Knobs().workers, Mapping[str, int])
assert_type(SameKnobs(), Knobs)
