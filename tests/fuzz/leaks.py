"""Draws specs, rows and changes of a table, and looks for leaks in each version: no feature may hold what it must not.

A seed draws where the label stands, ties in time, nulls and duplicates; splits and keys of all kinds; operators that
learn, rules on rows; then what happens to the table. One seed in SPARK_EVERY draws rules by which rows meet other rows,
and runs on Spark. A job that refuses a change is as good as one that makes it without a leak.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from sluice import FeatureTable
from sluice.common.errors import UsageError
from sluice.etl.jobs.engine import JobFailure
from sluice.etl.jobs.progress import JobProgress
from sluice.etl.spec.spec import Spec
from tests.etl.jobs import Said, run, session
from tests.etl.tables import write_rows
from tests.fuzz.oracle import CannotJudge, OneLabel, find_leaks

NAME = "leaks"
SPARK_EVERY = 40
_TYPES = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}
_UNTIL = 100.0
"""Times lie below this; what is appended is later."""


@dataclass(kw_only=True)
class Case:
    """A drawn table, as it is after some changes."""

    draw: random.Random
    spark: bool
    inputs: dict[str, str]
    """Input column → its type, in order."""
    was: dict[str, str] = field(default_factory=dict)
    optional: list[str] = field(default_factory=list)
    label: str = ""
    table: list[str] = field(default_factory=list)
    """The lines of [table] and of the sections on rows."""
    rules: list[str] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)
    """Column of the table → its entry."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """By the first names of the input's columns."""
    files: list[str] = field(default_factory=list)
    first_names: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The spec."""
        names = ", ".join(
            f'{{name = "{name}:{kind}", was = "{self.was[name]}"}}'
            if name in self.was
            else f'"{name}:{kind}"'
            for name, kind in self.inputs.items()
        )
        return "\n".join(
            [
                f'[input]\nformat = "parquet"\ncolumns = [{names}]\noptional = {self.optional}\n[table]',
                *self.table,
                *self.rules,
                self.label,
                *self.columns.values(),
            ]
        )

    def write(self, folder: Path, rows: list[dict[str, Any]]) -> str:
        """Writes rows with the columns as they are now."""
        path = folder / f"rows-{len(list(folder.glob('rows-*')))}.parquet"
        names = {name: self.first_names.get(name, name) for name in self.inputs}
        columns = {name: [row[first] for row in rows] for name, first in names.items()}
        kinds = {name: _TYPES[kind] for name, kind in self.inputs.items()}
        return str(write_rows(path, kinds=kinds, **columns))


def _rows(draw: random.Random, count: int, start: float, timed: bool) -> list[dict[str, Any]]:
    users, moments = draw.choice([2, 5, 20]), draw.choice([3, 20, 100])
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        if rows and draw.random() < 0.15:  # the same once more, or with another label
            twin = dict(draw.choice(rows))
            rows.append({**twin, "rating": draw.choice([twin["rating"], draw.randint(1, 5)])})
            continue
        at = start + draw.randrange(moments) * _UNTIL / moments
        rows.append(
            {
                "rating": draw.randint(1, 5),
                "user": _maybe(draw, f"u{draw.randrange(users)}"),
                "item": _maybe(draw, f"i{draw.randrange(6)}"),
                "at": at if timed else _maybe(draw, at),
                "price": _maybe(draw, draw.choice([0.5, 1.0, 2.25, -3.0])),
                "more": _maybe(draw, draw.randint(0, 5)),
                "part": draw.choice(["train", "train", "test"]),
            }
        )
    for row in rows:
        row["click"] = int(row["rating"] > 3)
    return rows


def _maybe(draw: random.Random, value: Any) -> Any:
    return None if draw.random() < 0.05 else value


def drawn(seed: int) -> Case:
    """The table as it is made first."""
    draw, spark = random.Random(seed), seed % SPARK_EVERY == 0
    label = draw.choice(["click", "rating"])
    names = {label: "int", "user": "text", "item": "text", "at": "float", "price": "float"}
    split = draw.choice(["hash", "hash", "by", "column", "time", "time"])
    if split == "column":
        names["part"] = "text"
    case = Case(draw=draw, spark=spark, inputs=dict(draw.sample(list(names.items()), len(names))))
    made = "" if label == "click" else 'ops = [{op = "compare", to = ">= 4"}]\n'
    case.label = f'[[column]]\nname = "label"\nfrom = "{label}"\nrole = "label"\n{made}'
    case.table = [
        f"seed = {draw.randrange(99)}",
        {
            "hash": "split = {train = 0.6, validation = 0.2, test = 0.2}",
            "by": 'split = {train = 0.6, test = 0.4}\nsplit_by = ["user"]',
            "column": 'split = {train = 0.5, test = 0.5}\nsplit_column = "part"',
            "time": 'split_time = "at"\nsplit = {train = 0, validation = 60, test = 80}',
        }[split],
    ]
    if draw.random() < 0.4:
        case.table.append(
            f"key = {draw.choice([['user', 'item', 'at'], ['user', 'at'], ['user']])}"
        )
    if draw.random() < 0.3:
        case.rules.append('[[filter]]\ncolumn = "price"\nop = ">"\nvalue = -1.0')
    rule = draw.random()
    if rule < 0.15:
        case.rules.append('[sample]\nnegatives = 0.5\nweight = "weight"')
    elif rule < 0.3 and label == "click":
        case.rules.append(f'[negatives]\ncolumn = "item"\neach = {draw.randint(1, 2)}')
    elif rule < 0.45:
        case.table.append('unlabelled = "ask"')
    case.rows = _rows(draw, draw.choice([30, 80, 150]), 0.0, split == "time")
    if 'unlabelled = "ask"' in case.table:
        for row in draw.sample(case.rows, 5):
            row |= {"click": None, "rating": None}
    sources = ["user", "item"]
    if spark:
        sources += _relations(case, label, split)
    for name in draw.sample(sources, draw.randint(1, len(sources))):
        _features(case, name)
    _add(
        case,
        "price",
        '"price"',
        '{op = "fill_mean"}, {op = "standardise"}',
    )
    return case


def _features(case: Case, name: str) -> None:
    """Columns that learn from one input column of texts, or of lists of texts."""
    if name.startswith("items"):
        _add(case, name, f'"{name}"', '{op = "categorify"}', "id_list")
        return
    if name == "times":
        _add(case, "earlier", '"times"', '{op = "bag", of = "max"}, {op = "fill"}')
        return
    if name in ("since", "before", "age"):
        _add(case, name, f'"{name}"', '{op = "fill"}, {op = "standardise"}')
        return
    draw = case.draw
    _add(
        case,
        f"{name} target",
        f'"{name}"',
        f'{{op = "target", folds = {draw.choice([2, 5])}, smoothing = {draw.choice([0.5, 20.0])}}}',
    )
    if draw.random() < 0.6:
        _add(case, f"{name} count", f'"{name}"', '{op = "count"}, {op = "fill"}')
        _add(case, f"{name} id", f'"{name}"', '{op = "categorify", min_count = 2}', "sparse")


def _add(case: Case, name: str, sources: str, ops: str, role: str = "dense") -> None:
    case.columns[name] = (
        f'[[column]]\nname = "{name}"\nfrom = [{sources}]\nrole = "{role}"\nops = [{ops}]\n'
    )


def _relations(case: Case, label: str, split: str) -> list[str]:
    """Rules by which rows meet other rows; returns the columns that they add."""
    draw, added = case.draw, []
    apart = split in (
        "time",
        "by",
    )  # only then no test row's label may stand in a training row's history
    sections = {
        "items": 'history]]\nname = "items"\nof = "item"\nby = "user"\norder = "at"\nlength = 3',
        "times": 'history]]\nname = "times"\nof = "at"\nby = "user"\norder = "at"\nlength = 20',
        "since": 'lag]]\nname = "since"\nof = "at"\nby = "user"\norder = "at"\ndifference = true',
        "last": f'lag]]\nname = "last"\nof = "item"\nby = "user"\norder = "at"\nrows = {draw.randint(1, 2)}',
        "age": 'join]]\npath = "SIDE"\non = "user"\ncolumns = ["age:int"]\ntime = "at"\ntheir_time = "from"',
    }
    if apart:
        sections["before"] = f'lag]]\nname = "before"\nof = "{label}"\nby = "user"\norder = "at"'
        if label == "click":
            sections["items_clicked"] = (
                'history]]\nname = "items_clicked"\nof = "item"\nby = "user"\norder = "at"\n'
                "length = 3\npositive = true"
            )
    if draw.random() < 0.3:
        case.rules.append(
            draw.choice(
                ["[dedup]", '[dedup]\nby = ["user", "at"]\norder = "price"\nkeep = "first"']
            )
        )
    for name in sorted(draw.sample(list(sections), 3), key=lambda name: name != "age"):
        case.rules.append("[[" + sections[name])
        added.append(name)
    return added


def _change(case: Case, folder: Path) -> dict[str, Any]:
    """What happens to the table next: the options of a job, for which files and spec are ready."""
    draw = case.draw
    if draw.random() < 0.4 and not any(rule.startswith("[dedup]") for rule in case.rules):
        # Rows that meet others are appended later, as a history goes on from those that were there.
        new = _rows(draw, 40, 90.0 if "time" in case.table[1] and not case.spark else _UNTIL, True)
        case.rows += new
        case.files.append(case.write(folder, new))
        return {"mode": "append", "update_state": draw.random() < 0.5, "input": case.files[-1:]}
    for change in draw.sample(["add", "drop", "reorder", "rename", "key"], draw.randint(0, 2)):
        if change == "add" and "more" not in case.inputs:
            case.inputs, case.optional = {"more": "int", **case.inputs}, ["more"]
            _add(case, "more", '"more"', '{op = "fill"}')
        elif change == "drop" and len(case.columns) > 1:
            del case.columns[draw.choice(list(case.columns))]
        elif change == "reorder":
            case.inputs = dict(draw.sample(list(case.inputs.items()), len(case.inputs)))
        elif change == "rename" and "cost" not in case.inputs:
            case.inputs = {
                "cost" if name == "price" else name: kind for name, kind in case.inputs.items()
            }
            case.was["cost"], case.first_names["cost"] = "price", "price"
            case.rules = [rule.replace('"price"', '"cost"') for rule in case.rules]
            case.columns = {
                name: entry.replace('"price"]', '"cost"]') for name, entry in case.columns.items()
            }
        elif change == "key" and not any(line.startswith("key") for line in case.table):
            case.table.append("key = ['user', 'at']")
    case.files = [case.write(folder, case.rows)]
    return {
        "mode": "overwrite",
        "input": case.files,
        **draw.choice([{"update_state": True}, {"update_state": True}, {"refit": True}, {}]),
    }


def try_seed(seed: int, folder: Path) -> list[str]:
    """The leaks in the versions of a drawn table, and whatever keeps the oracle from looking for them."""
    case, findings = drawn(seed), list[str]()
    spark, out = session() if case.spark else None, folder / "table"
    side = write_rows(
        folder / "side.parquet",
        user=[f"u{n % 20}" for n in range(60)],
        age=[n * 3 % 17 for n in range(60)],
        **{"from": [float(n * 7 % 100) for n in range(60)]},
    )
    case.rules = [rule.replace("SIDE", str(side)) for rule in case.rules]
    case.files = [case.write(folder, case.rows)]
    options: dict[str, Any] = {"mode": "create", "input": case.files}
    inputs = list[list[str]]()
    for number in range(2 if case.spark else 3):
        said, text = f"version {number}, {options}", case.text()
        (folder / f"spec-{number}.toml").write_text(text)
        Spec.own(text)  # what is drawn is no wrong spec: only a job may refuse it
        try:
            run(
                spark,
                out,
                *options.pop("input"),
                text=text,
                max_rejects=1.0,
                accept_nulls=tuple(case.inputs),
                split_moved=case.draw.choice(["refuse", "accept"]),
                **options,
            )
        except (UsageError, JobFailure):
            return findings
        table = FeatureTable.open(out)
        inputs.append(list(case.files))
        try:
            leaks = find_leaks(table, inputs, engine(spark), flips=6, seed=seed)
        except OneLabel:
            return findings
        except CannotJudge as error:
            return [*findings, f"{said}: {error}"]
        findings += [f"{said}: {leak.text}" for leak in leaks]
        options = _change(case, folder)
    return findings


def engine(spark: Any) -> Any:
    from sluice.etl.local.engine import LocalEngine
    from sluice.etl.spark.engine import SparkEngine

    progress = JobProgress(Said())
    if spark is None:
        return partial(LocalEngine, progress=progress, threads=1)
    return partial(SparkEngine, lambda: spark, progress=progress)
