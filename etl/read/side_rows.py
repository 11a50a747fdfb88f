"""`SideRows`: reads the side table of a join as an input is read, with its values in their declared types."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import InputError
from sluice.etl.apply.cells import column_or_nulls, stored_column
from sluice.etl.apply.input_checks import refuse_missing
from sluice.etl.apply.lines import are_headers, strip_end
from sluice.etl.apply.parse import Batches, LineReader
from sluice.etl.apply.rejected import encoded_headers
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.ops.chain import SHOWN
from sluice.etl.read.input_files import InputFiles
from sluice.etl.read.input_paths import files_of
from sluice.etl.read.pieces import Piece, first_line
from sluice.etl.read.row_groups import RowGroups, check_columns
from sluice.etl.spec.input_section import WITH_COLUMNS, Input
from sluice.etl.spec.row_rules import Join
from sluice.etl.spec.toml_keys import SpecError

SINCE = "_since"
"""The new name of the time from which on a side row is valid."""
_Cells = dict[str, tuple[pa.Array, Sequence[int] | npt.NDArray[np.intp], pa.Array]]
"""For each wanted column: its values, the rows that do not fit, and what was read."""


@dataclass(frozen=True)
class SideRows:
    """What a worker needs to read pieces of a side table."""

    join: Join
    wanted: Mapping[str, tuple[str, str]]
    """The columns that the join uses, by new names: the side table's column, and its type."""
    refused: Collection[str]
    """The new names of columns in which a value of another type fails the job. In others it is null."""
    names: Sequence[str] = ()
    """All columns of csv, in order."""

    @classmethod
    def of(cls, join: Join, types: Mapping[str, str], accepted: Collection[str]) -> SideRows:
        """`types` are those of the input's columns. In the `accepted` columns, a value that does not fit is null."""
        keys = zip(join.their_on or join.on, join.on, strict=True)
        wanted = {f"_on{i}": (name, types[ours]) for i, (name, ours) in enumerate(keys)}
        wanted |= {name: (name, kind) for name, kind in join.columns.items()}
        if join.time and join.their_time:
            wanted[SINCE] = (join.their_time, "float")
            # A float has not all digits of a whole number.
            if types[join.time] == "int" and not join.their_format:
                wanted["_whole"] = (join.their_time, "int")
        refused = [
            new
            for new, (name, _) in wanted.items()
            if (new in join.columns or new == SINCE) and name not in accepted
        ]
        return cls(join, wanted, refused)

    @property
    def stored(self) -> dict[str, tuple[str, str]]:
        """The columns as they are read: a time with a format is a text."""
        if not self.join.their_format:
            return dict(self.wanted)
        return {**self.wanted, SINCE: (self.wanted[SINCE][0], "text")}

    @property
    def named(self) -> str:
        return f"join.path = {self.join.path!r}"

    @property
    def used(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.wanted.values()))

    def source_of(self, columns: Iterable[tuple[str, str]]) -> Input:
        """Returns the side table as an input with these columns. Other columns of csv are texts."""
        join = self.join
        return Input(
            format=join.format,
            columns=dict.fromkeys(self.names, "text") | dict(columns),
            delimiter=join.delimiter,
            header=bool(self.names) and not join.fields,
            encoding=join.encoding,
            decimal=join.decimal,
            number_texts=True,
        )

    def batches(self, pieces: Iterable[Piece | RowGroups]) -> Batches:
        """Yields the wanted columns by their new names."""
        for piece in pieces:
            read = self._stored(piece) if isinstance(piece, RowGroups) else self._lines(piece)
            for cells in read:
                if reader := self.join.their_format:
                    texts, unfit, given = cells[SINCE]
                    times = reader.apply(texts, None)
                    no_times = np.flatnonzero(pc.and_(pc.is_valid(texts), pc.is_null(times)))
                    cells[SINCE] = times, [*unfit, *no_times], given
                for new, (_, unfit, given) in cells.items():
                    if len(unfit) and new in self.refused:
                        raise JobFailure(self._refusal(new, given[int(unfit[0])].as_py()))
                yield pa.record_batch({new: values for new, (values, *_) in cells.items()})

    def _refusal(self, new: str, value: object) -> str:
        """Returns the error for a value that does not fit its column."""
        name, kind = self.wanted[new]
        reader = self.join.their_format
        what, advice = f"a value is not of its type, {kind}", "correct it"
        if new == SINCE and reader:
            what = f"a value is no time by format = {reader.format!r}"
        elif new == SINCE:
            what = "a value is no number, as their_time must be"
            advice = f'give the format of a text: their_time = {{name = {json.dumps(name)}, format = "%Y-%m-%d"}}'
        return (
            f"{self.named}: column {name!r}: {what}: {_shown(value)}; nothing was published; {advice}, or accept that "
            f"such values are null with --accept-nulls {name}"
        )

    def _stored(self, groups: RowGroups) -> Iterator[_Cells]:
        for rows in groups.stored(self.used):
            cells: _Cells = {}
            for new, (name, kind) in self.stored.items():
                read = column_or_nulls(rows, name)
                values, lost = stored_column(read, kind)
                cells[new] = values, () if lost is None else np.flatnonzero(lost), read
            yield cells

    def _lines(self, piece: Piece) -> Iterator[_Cells]:
        # A column may be wanted in several types, and a reader has one for each column.
        readers = {
            kind: LineReader(
                self.source_of(column for column in self.stored.values() if column[1] == kind)
            )
            for _, kind in self.stored.values()
        }
        headers = encoded_headers(self.source_of(self.stored.values()))
        for batch in piece.batches():
            lines = batch["line"].filter(pc.invert(are_headers(batch["line"], headers)))
            read = {kind: reader.read(lines) for kind, reader in readers.items()}
            for _, reasons, _ in read.values():
                for row, reason in reasons.items():
                    raise JobFailure(
                        f"{self.named}: {piece.file.name}: {reason}: {_shown(lines[row].as_py())}; nothing was "
                        "published; correct the line"
                    )
            yield {
                new: (read[kind][0][name], read[kind][2].get(name, ()), lines)
                for new, (name, kind) in self.stored.items()
            }


def open_side_table(rows: SideRows) -> tuple[SideRows, InputFiles]:
    """Returns the rows with the columns of their files, and the files. Raises a SpecError if the files cannot be read,
    and an InputError if they lack a column of the join."""
    join, has_lines = rows.join, rows.join.format not in WITH_COLUMNS
    try:
        if join.format == "csv":
            rows = replace(rows, names=_columns_of_csv(join))
        files = InputFiles(rows.source_of(rows.stored.values()), (join.path,))
        if has_lines:
            files.check()
        else:  # they are read here, where errors become those of the join
            schemas = files.schemas
    except (InputError, OSError) as error:
        raise SpecError(f"{rows.named}: cannot be read ({error})") from None
    if join.format == "json":
        refuse_missing(rows.named, _members_of(files, rows.used), rows.used)
    elif has_lines:
        refuse_missing(rows.named, rows.names, rows.used)
    else:
        for column in rows.stored.values():
            check_columns(rows.named, schemas, rows.source_of([column]))
    return rows, files


def check_side_table(join: Join, types: Mapping[str, str], accepted: Collection[str]) -> None:
    """Raises what `open_side_table` raises, and a JobFailure if one of the first values does not fit its column."""
    rows, files = open_side_table(SideRows.of(join, types, accepted))
    next(rows.batches(files.pieces()), None)


def _columns_of_csv(join: Join) -> Sequence[str]:
    """Returns the names in the header of the first file, or those of `join.fields`, which must be as many."""
    files = files_of((join.path,))
    lines = [first_line(file, join.encoding) for file in files[:1]]
    names = next(csv.reader(lines, delimiter=join.delimiter), [])
    if join.fields and len(names) != len(join.fields):
        raise InputError(
            f"it has {len(names)} columns, and join.fields names {len(join.fields)}; name all of them, in order"
        )
    names = [*(join.fields or names)]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"it has two columns {again!r}; rename one of them")
    return names


def _members_of(files: InputFiles, names: Sequence[str]) -> list[str]:
    """Returns those names that a line of JSON has as a text. Reads no more lines than needed."""
    left = {name: json.dumps(name.rpartition(".")[2], ensure_ascii=False) for name in names}
    for piece in files.pieces():
        for batch in piece.batches():
            for name, text in list(left.items()):
                if pc.any(pc.match_substring(batch["line"], text)).as_py():
                    del left[name]
        if not left:
            break
    return [name for name in names if name not in left]


def _shown(value: object) -> str:
    text = strip_end(value).decode(errors="replace") if isinstance(value, bytes) else str(value)
    return repr(text[:SHOWN])
