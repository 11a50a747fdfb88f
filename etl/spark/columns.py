"""The names of columns and of their types in Spark's SQL."""

from __future__ import annotations

SPARK_TYPES = {
    "int": "bigint",
    "float": "double",
    "text": "string",
    "texts": "array<string>",
    "floats": "array<double>",
}


def quoted(name: str) -> str:
    """Returns a column's name as Spark's SQL writes it."""
    return f"`{name.replace('`', '``')}`"
