"""The schema of data files."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

from sluice.etl.schema import Field

METADATA_KEY = b"sluice"


def arrow_schema(fields: Sequence[Field]) -> pa.Schema:
    """Returns the schema in which these fields are stored. Its metadata describes each field for readers.

    It has no cardinalities, because an append may raise them and cannot change a table's schema."""
    columns = []
    for f in fields:
        about = {
            "role": f.role,
            "layout": f.layout,
            "width": f.width,
            "online": list(f.online),
            "inputs": list(f.inputs),
            **({"values_rule": f.values_rule} if f.values_rule > 1 else {}),
        }
        columns.append(
            pa.field(
                f.name,
                _arrow_type(f.type),
                nullable=f.nullable,
                metadata={METADATA_KEY: json.dumps(about, sort_keys=True).encode()},
            )
        )
    return pa.schema(columns)


def with_dictionaries(schema: pa.Schema) -> list[str]:
    """Returns the columns that files store in dictionaries: texts. The loader's operators then see each value once."""
    return [f.name for f in schema if f.type == pa.string() and f.nullable]


def _arrow_type(name: str) -> pa.DataType:
    if name.startswith("list<"):
        return pa.list_(
            pa.field("element", pa.type_for_alias(name[5:-1].removeprefix("element: ")))
        )
    return pa.type_for_alias(name)
