"""Specs, rows and lines of tests: what most tests of the ETL begin with."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice import FeatureTable
from sluice.etl.read.pieces import Piece


def column(name: str, role: str, ops: str = "", source: str | Sequence[str] = "") -> str:
    """Returns a [[column]] entry. A name with a star is a `match`; `ops` are such as `fill; hash, size = 9`."""
    key = "match" if "*" in name else "name"
    chain = (step.partition(",") for step in ops.split("; "))
    made = ", ".join(f'{{op = "{op}"{comma}{keys}}}' for op, comma, keys in chain)
    return (
        f'[[column]]\n{key} = "{name}"\n'
        + (f"from = {json.dumps(source)}\n" if source else "")
        + f'role = "{role}"\n'
        + (f"ops = [{made}]\n" if ops else "")
    )


def write_spec(
    inputs: str | Iterable[str | tuple[str, str]],
    *sections: str,
    form: str = "parquet",
    head: str = "",
    table: str = "split = {all = 1.0}",
    label: str = "",
) -> str:
    """Returns a spec's text. The first of the `inputs`, such as `click:int item:text`, is the label if none is named.

    An input that is a pair is a column, and what it was. `head` and `table` are lines of [input] and [table].
    """
    entries = inputs.split() if isinstance(inputs, str) else list(inputs)
    columns = ", ".join(
        f'"{entry}"' if isinstance(entry, str) else f'{{name = "{entry[0]}", was = "{entry[1]}"}}'
        for entry in entries
    )
    parts = [f'[input]\nformat = "{form}"\ncolumns = [{columns}]\n{head}']
    if table:
        parts.append(f"[table]\n{table}\n")
    parts.append(column(label or str(entries[0]).partition(":")[0], "label"))
    return "".join([*parts, *sections])


def section(kind: str, /, **keys: Any) -> str:
    """Returns an entry of the spec such as a [[lag]] or a [[join]]."""
    lines = [f"[[{kind}]]", *(f"{key} = {toml(value)}" for key, value in keys.items()), ""]
    return "\n".join(lines)


def toml(value: Any) -> str:
    """Returns a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def write_rows(
    path: Path | str,
    rows: pa.Table | Sequence[dict[str, Any]] | None = None,
    kinds: Mapping[str, pa.DataType] | None = None,
    row_group_size: int | None = None,
    **columns: Any,
) -> Path:
    """Writes a Parquet file of rows or of columns, and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if rows is not None and not isinstance(rows, pa.Table):
        columns = {name: [row[name] for row in rows] for name in rows[0]}
    kinds = kinds or {}
    made = {n: pa.array(v, kinds[n]) if n in kinds else v for n, v in columns.items()}
    table = rows if isinstance(rows, pa.Table) else pa.table(made)
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def put(path: Path, content: str | bytes) -> Path:
    """Writes a text or bytes to a file, makes the folders above it, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def batch_of(lines: Iterable[bytes]) -> pa.RecordBatch:
    """Returns lines as an engine hands them to the parser: each with its line feed."""
    return pa.record_batch([pa.array([line + b"\n" for line in lines], pa.binary())], ["line"])


def lines_of(pieces: Iterable[Piece]) -> list[bytes]:
    """Returns the lines of pieces, as they are handed to the parser."""
    batches = (batch for piece in pieces for batch in piece.batches())
    return [line for batch in batches for line in batch["line"].to_pylist()]


def columns_of(table: pa.Table) -> dict[str, pa.Array]:
    return {name: table[name].combine_chunks() for name in table.column_names}


def struct_of(**columns: pa.Array) -> pa.StructArray:
    """Returns the columns as the one that an operator over several takes."""
    return pa.StructArray.from_arrays(list(columns.values()), list(columns))


def rejects_of(table: FeatureTable) -> list[dict[str, Any]]:
    """Returns the rows that the table's last job has set aside."""
    return lines_in(Path(table.uri, "_sluice", "rejects", table.record.job))


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """Returns the objects in a folder's files of JSON lines."""
    return [
        json.loads(line)
        for part in folder.glob("*.json")
        for line in part.read_bytes().splitlines()
    ]
