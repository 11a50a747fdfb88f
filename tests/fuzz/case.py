"""A spec with rows (`Case`): as the spec's text, as a file, and as a request to a server."""

import datetime
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from sluice.etl.spec.input_section import ARROW_TYPES, NUMBERS
from tests.etl.tables import section, write_rows

KEY = "number"
"""The input column, and the dense column, that tells rows apart."""
LABEL = "click"
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


@dataclass(frozen=True)
class Misfit:
    """A value that its column cannot hold, as a text file and as JSON have it."""

    text: str
    json: str


@dataclass(kw_only=True)
class Case:
    """A drawn spec with rows."""

    seed: int
    form: str
    inputs: dict[str, str]
    """Input column → its type."""
    rows: dict[str, list[Any]]
    """Input column → a value for each row: as the request has it, or a `Misfit`."""
    folder: Path
    """Where the files lie that the spec names."""
    head: str = ""
    """The sections [input] and [table] of the spec."""
    entries: list[dict[str, Any]] = field(default_factory=list)
    """The [[column]] entries, as the ETL applies all of them."""
    left: list[dict[str, Any]] = field(default_factory=list)
    """The same entries, of which some leave operators to the loader."""
    transforms: list[dict[str, Any]] = field(default_factory=list)
    time: str | None = None
    """The input column that files hold as the text of a time."""
    delimiter: str = ","
    decimal: str = "."
    thousands: str = ""
    null_values: list[str] = field(default_factory=list)
    number_texts: bool = False
    """Whether some numbers are written as people write them, and as texts in JSON."""
    header: bool = False
    has_rules: bool = False
    """Whether rows get columns from others: from side tables, lags and histories."""

    def etl(self) -> str:
        """The spec in which the ETL applies every operator."""
        return self.text(self.entries)

    def loader(self) -> str:
        """The spec in which some operators are left to the loader, with transforms on top."""
        return (
            self.text(self.left)
            + "\n"
            + "\n".join(section("transform", **transform) for transform in self.transforms)
        )

    def plain(self, columns: Sequence[str]) -> str:
        """The spec of these columns alone, by which a loader reads the file itself."""
        entries = [entry for entry in self.entries if entry.get("name") in {LABEL, KEY, *columns}]
        return "\n".join(
            [
                self.head.partition("[table]")[0],
                "[table]",
                "split = {all = 1}",
                *(section("column", **entry) for entry in entries),
            ]
        )

    def text(self, entries: list[dict[str, Any]]) -> str:
        return self.head + "\n" + "\n".join(section("column", **entry) for entry in entries)

    @property
    def count(self) -> int:
        return len(self.rows[KEY])

    def misfits(self, numbers: Sequence[int], names: Sequence[str]) -> list[int]:
        """The places of those rows in which one of these columns has a value that it cannot hold."""
        return [n for n in numbers if any(isinstance(self.rows[name][n], Misfit) for name in names)]

    # ---- as a file

    def write(self) -> Path:
        """Writes the rows as a file of the spec's format."""
        path = self.folder / f"rows.{self.form}"
        draw = random.Random(self.seed)
        if self.form == "parquet":
            self._write_parquet(path, draw)
        elif self.form == "json":
            path.write_text("".join(self._json_line(n, draw) for n in range(self.count)), "utf-8")
        else:
            lines = [self.delimiter.join(self.inputs)] * self.header
            lines += [
                self.delimiter.join(self._cell(name, n, draw) for name in self.inputs)
                for n in range(self.count)
            ]
            path.write_bytes("".join(f"{line}\n" for line in lines).encode())
        return path

    def _of_file(self, name: str, row: int) -> Any:
        value = self.rows[name][row]
        if name != self.time or value is None or isinstance(value, Misfit):
            return value
        return f"{datetime.datetime.fromtimestamp(value, datetime.UTC):{TIME_FORMAT}}"

    def _cell(self, name: str, row: int, draw: random.Random) -> str:
        value, kind = self._of_file(name, row), self.inputs[name]
        amount = self._amount(name, row, value)
        if amount is not None:
            return self._quoted(amount, draw)
        if value is None:
            return ""
        if isinstance(value, Misfit):
            return self._quoted(value.text, draw)
        if isinstance(value, str):
            return self._quoted(value, draw)
        if kind == "int":
            return draw.choice(
                [f"{value}", f" {value}", f"{value}\t" if self.delimiter != "\t" else f"{value} "]
            )
        return repr(value).replace(".", self.decimal)

    def _amount(self, name: str, row: int, value: Any) -> str | None:
        """The text of a number or of a missing one, in every third row. None: it is written as always."""
        if not self.number_texts or self.inputs[name] not in NUMBERS or (row + len(name)) % 3:
            return None
        if value is None:
            return self.null_values[row % len(self.null_values)] if self.null_values else None
        if not isinstance(value, int | float) or name == self.time:
            return None
        sign, text = "-" * (repr(value)[0] == "-"), repr(value).removeprefix("-")
        whole, point, fraction = text.partition(".")
        if self.thousands and whole.isdecimal() and "e" not in fraction:
            whole = f"{int(whole):,}".replace(",", self.thousands)
        return f"{sign}{whole}{point and self.decimal}{fraction}"

    def _literal(self, name: str, row: int, value: Any, draw: random.Random) -> str:
        amount = self._amount(name, row, value)
        return literal(value if amount is None else amount, draw)

    def _quoted(self, text: str, draw: random.Random) -> str:
        must = not text or text.startswith('"') or self.delimiter in text
        if self.form == "tsv" or not (must or draw.random() < 0.2):
            return text
        return '"' + text.replace('"', '""') + '"'

    def _json_line(self, row: int, draw: random.Random) -> str:
        members = [
            f'"{name}": {self._literal(name, row, self._of_file(name, row), draw)}'
            for name in self.inputs
            if self.rows[name][row] is not None or draw.random() < 0.5
        ]
        if draw.random() < 0.1:
            members.insert(draw.randrange(len(members)), '"other": [{"a": 1}]')
        return "{" + ", ".join(members) + "}\n"

    def _write_parquet(self, path: Path, draw: random.Random) -> None:
        columns = {}
        for name, kind in self.inputs.items():
            values = [self._of_file(name, n) for n in range(self.count)]
            if any(isinstance(value, Misfit) for value in values):  # fractions in a column of ints
                values = [float(cell.text) if isinstance(cell, Misfit) else cell for cell in values]
                columns[name] = pa.array(
                    [None if cell is None else float(cell) for cell in values], pa.float64()
                )
                continue
            array = pa.array(values, pa.string() if name == self.time else ARROW_TYPES[kind])
            if kind == "text" and draw.random() < 0.5:
                array = array.dictionary_encode()
            if (
                kind == "int"
                and name != self.time
                and draw.random() < 0.3
                and _fits_32_bits(values)
            ):
                array = array.cast(pa.int32())
            columns[name] = array
        write_rows(path, row_group_size=draw.choice([7, 50, 1000]), **columns)

    # ---- as a request

    def fits_json(self, row: int) -> bool:
        """Whether JSON can hold the numbers of a row. It has no NaN and no infinity."""
        values = (self.rows[name][row] for name in self.inputs if name != LABEL)
        return all(
            not isinstance(item, float) or math.isfinite(item)
            for value in values
            for item in (value if isinstance(value, list) else [value])
        )

    def request(self, numbers: Sequence[int], draw: random.Random) -> bytes:
        """The body of a request for these rows."""
        rows = [
            ", ".join(
                f'"{name}": {self._literal(name, number, value, draw)}'
                for name in self.inputs
                if name != LABEL
                and ((value := self.rows[name][number]) is not None or draw.random() < 0.5)
            )
            for number in numbers
        ]
        return f'{{"rows": [{", ".join(f"{{{row}}}" for row in rows)}]}}'.encode()


def _fits_32_bits(values: Sequence[int | None]) -> bool:
    return all(value is None or -(2**31) <= value < 2**31 for value in values)


def literal(value: Any, draw: random.Random) -> str:
    """A value as JSON has it; NaN and infinities as Python's reader takes them."""
    if isinstance(value, Misfit):
        return value.json
    if isinstance(value, int) and value in (0, 1) and draw.random() < 0.05:
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=draw.random() < 0.5)
