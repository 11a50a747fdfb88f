"""`LineFormat`: an input format that cuts each line into cells by a rule of its own.

TSV, CSV and JSON have readers for many lines at once. A further format is a subclass in this file. The parser does the
rest, one line after another: it checks the number of cells, converts them, and rejects lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class LineFormat(ABC):
    """The fields of a subclass are its keys in [input]."""

    name: ClassVar[str]
    """Its `input.format`."""

    def __init_subclass__(cls) -> None:
        LINE_FORMATS[cls.name] = cls

    @abstractmethod
    def cells(self, line: bytes) -> Sequence[bytes | None]:
        """Returns the cells of a line, which is UTF-8 and has no end. None is a missing cell."""


LINE_FORMATS: dict[str, type[LineFormat]] = {}
