"""Compares lags and histories of drawn values with a plain look at the cells that the job's parser has.

A seed draws a form, and values of each declared type, as `one_value` does. A lag and a history of them must be as in
the plain look: in a job on Spark, in one that goes on from it, and in a server at each row's time and at a drawn one. A
server refuses a row if and only if its state has lost what the row may see.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from sluice.etl.spark.history_state import write_tails
from sluice.etl.spec.row_rules import HistorySpec
from sluice.etl.spec.row_split import TIES
from tests.etl.jobs import session
from tests.etl.tables import column, section, write_spec
from tests.fuzz.one_value import drawn_values, parsed_rows, same, write
from tests.product import (
    ARROW_TYPES,
    InputFiles,
    RawInput,
    Serving,
    Spec,
    TableStore,
    folder_of_tails,
)

NAME = "earlier_rows"
_KINDS = {"number": "int", "part": "float", "word": "text"}
_ROWS = 300
Row = Mapping[str, Any]


def try_seed(seed: int, folder: Path) -> list[str]:
    """What differs from the plain look at this seed."""
    draw = random.Random(seed)
    form, order = draw.choice(["csv", "json", "parquet"]), draw.choice(["number", "part"])
    spec, store = Spec.own(_spec(draw, form, order)), TableStore(folder / "table")
    (folder / "spec.toml").write_text(spec.text)
    columns: dict[str, Any] = {"click": [n % 2 for n in range(_ROWS)], "place": range(_ROWS)}
    columns |= {name: drawn_values(draw, form, kind, _ROWS, 30) for name, kind in _KINDS.items()}
    whole = _write(folder / f"whole.{form}", columns, range(_ROWS))
    cells = {row["place"]: row for row in parsed_rows(spec, whole) if row}
    moments = sorted(_moment(row[order]) for row in cells.values())
    early = [n for n, row in cells.items() if _moment(row[order]) < moments[len(moments) // 2]]
    late = [n for n in range(_ROWS) if n not in early]
    related = _related(spec, store, "early", _write(folder / f"early.{form}", columns, early))
    path = _write(folder / f"late.{form}", columns, late)
    related |= _related(spec, store, "late", path, "early")
    if sorted(cells) != sorted(related):
        return [f"rows {sorted(related)}, not {sorted(cells)}"]
    rows = sorted(
        cells.values(),
        key=lambda row: (_moment(row[order]), [related[row["place"]][tie] for tie in TIES]),
    )
    known = [row for row in rows if row["place"] in early]
    late_otherwise = [
        f"{have!r} is late in row {row}, not {want!r}"
        for row in rows
        if row["place"] not in early
        for have, want in [(related[row["place"]]["_late"], _late(spec, row, known, order))]
        if have != want
    ]
    times = draw.choices([row[order] for row in rows], k=len(rows))
    asked = rows + [{**row, order: time} for row, time in zip(rows, times, strict=True)]
    served, problems = _served(_table(spec, store, "late"), asked)
    findings = [
        f"{history.name} of {form} in {way}: {have!r}, not {want!r}, of {row}"
        for history in spec.rows.histories
        for way, made, answered in (
            ("a job", [related[row["place"]] for row in rows], [*enumerate(rows)]),
            ("a server", served, [(n, row) for n, row in enumerate(asked) if n not in problems]),
        )
        for number, row in answered
        for have, want in [(made[number][history.name], _plain_look(history, row, rows))]
        if repr(have) != repr(want)
    ]
    lost = {
        number
        for number, row in enumerate(asked)
        if any(_is_lost(history, row, rows) for history in spec.rows.histories)
    }
    return (
        late_otherwise
        + findings
        + [
            f"a server {'answers' if number in lost else 'refuses'} {asked[number]}: {problems.get(number)}"
            for number in sorted(lost ^ problems.keys())
        ]
    )


def _spec(draw: random.Random, form: str, order: str) -> str:
    source, by, other, key = draw.choices(list(_KINDS), k=4)
    lag = {"rows": draw.randint(1, 2), "difference": source != "word" and draw.random() < 0.5}
    history = {"length": draw.randint(1, 3), "positive": draw.random() < 0.3}
    rules = [
        section("lag", name="before", of=source, by=by, order=order, **lag),
        section("history", name="past", of=other, by=key, order=order, **history),
    ]
    inputs = ["click:int", "place:int", *(f"{name}:{kind}" for name, kind in _KINDS.items())]
    head = "" if form == "parquet" else 'decimal = "."\n'
    rules += [
        column("before", "sparse", "hash, size = 9"),
        column("past", "id_list", "hash, size = 9"),
    ]
    return write_spec(inputs, *rules, column("place", "dense", "fill"), form=form, head=head)


def _served(table: Any, rows: list[Row]) -> tuple[list[Row], Mapping[int, str]]:
    """Returns what a server makes of rows, and those that it refuses."""
    cells = {
        name: pa.array([row[name] for row in rows], ARROW_TYPES[kind])
        for name, kind in _KINDS.items()
    }
    made = Serving.open(table).complete(cells, problems := {})
    return pa.table(made).to_pylist(), problems


def _write(path: Path, columns: Mapping[str, Any], places: Sequence[int]) -> Path:
    chosen = {
        name: values.take(pa.array(places, pa.int64()))
        if isinstance(values, pa.Array)
        else [values[place] for place in places]
        for name, values in columns.items()
    }
    return write(path, _KINDS, chosen)


def _related(
    spec: Spec, store: TableStore, job: str, path: Path, before: str = ""
) -> dict[int, Row]:
    """Returns the rows of a job by their places, and writes what a server and a next job must know."""
    names = [history.name for history in spec.rows.histories] if before else []
    earlier = {name: store.spark_url(folder_of_tails(before, name)) for name in names}
    raw = RawInput(session(), spec, InputFiles(spec.input, (str(path),)), None, earlier, ())
    try:
        rows = [row.asDict() for row in raw.related.collect()]
        write_tails(raw, store, job)
    finally:
        raw.release()
    return {row["place"]: row for row in rows}


def _table(spec: Spec, store: TableStore, job: str) -> Any:
    """Returns what a server reads of a table with the version that this job made."""
    record = SimpleNamespace(job=job)
    return SimpleNamespace(uri=store.uri, fields=spec.fields({}), record=record, spec=lambda: spec)


def _late(spec: Spec, row: Row, known: list[Row], order: str) -> str | None:
    """Returns the first history that has a newer value of the row's key in the rows of the early job."""
    for history in spec.rows.histories:
        for other in known:
            enters = history.lag or (
                other[history.of] is not None and (other["click"] or not history.positive)
            )
            if (
                enters
                and None not in (row[history.by], row[order], other[order])
                and same(other[history.by]) == same(row[history.by])
                and _moment(other[order]) > _moment(row[order])
            ):
                return history.name
    return None


def _moment(value: Any) -> tuple[Any, ...]:
    """Returns what orders rows: nulls come first, and NaN last."""
    is_nan = same(value) == "nan"
    return (value is not None, is_nan, 0 if is_nan or value is None else value)


def _entries(history: HistorySpec, key: Any, rows: list[Row]) -> list[Row]:
    """Returns the rows of a key that enter a lag or a history."""
    return [
        row
        for row in rows
        if key is not None and same(row[history.by]) == same(key)
        if history.lag or (row[history.of] is not None and (row["click"] or not history.positive))
    ]


def _plain_look(history: HistorySpec, row: Row, rows: list[Row]) -> Any:
    """Returns a row's lag or history, from the rows before its moment."""
    order = history.order
    values = [
        earlier[history.of]
        for earlier in _entries(history, row[history.by], rows)
        if _moment(earlier[order]) < _moment(row[order])
    ]
    if not history.lag:
        return values[-history.length :]
    before = values[-history.lag] if len(values) >= history.lag else None
    now = row[history.of]
    if not history.difference or before is None:
        return before
    is_known = now is not None and (isinstance(now, float) or -(2**63) <= now - before < 2**63)
    return now - before if is_known else None


def _is_lost(history: HistorySpec, row: Row, rows: list[Row]) -> bool:
    """Whether a row has no time, or may see what the state lacks: the state has as many entries as a row may see of the
    last moment, and as many of those before it."""
    if row[history.order] is None:
        return row[history.by] is not None
    most, now = history.lag or history.length, _moment(row[history.order])
    moments = [_moment(entry[history.order]) for entry in _entries(history, row[history.by], rows)]
    older = [moment for moment in moments if moment < moments[-1]][-most:]
    of_last = [moment for moment in moments if moment == moments[-1]][-most:]
    return len(older) == most and sum(moment < now for moment in older + of_last) < most
