"""Compares the four ways to a feature: the Spark job, the local engine, the loader and the server.

A seed draws a spec and rows (`tests.fuzz.drawn_specs`). The local engine applies every operator. The loader and the
server get a table in which some operators are left to them; a loader also reads Parquet input by the spec itself. One
seed in SPARK_EVERY runs the Spark job, too. In half of these, there are joins as of a time, lags and histories, which
only Spark makes. All must make the same bits of every row, and refuse the same rows. Each row is asked of the server at
its own time. The server refuses it only if newer rows have taken the place of those that it may see.
"""

import json
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice import BagColumn, Errors, FeatureTable
from sluice.dlrm.options import profile_of
from sluice.etl.apply.lookups import needed_columns
from tests.dlrm.serving.stub import decoded, servable
from tests.etl.jobs import on, session
from tests.fuzz.case import KEY, LABEL, Case
from tests.fuzz.drawn_specs import MODULE, drawn, parsed
from tests.open_loader import open_loader
from tests.product import (
    Decoder,
    Fitted,
    Job,
    ModelConfig,
    ParquetFiles,
    Python,
    Refusal,
    Spec,
    TableStore,
    tables_of,
)

NAME = "four_ways"
SPARK_EVERY = 8
"""One seed in so many runs the Spark job."""
_MOST_SHOWN, _MOST_REFUSED = 5, 10
_BATCH = 16

Rows = dict[int, Any]
Columns = dict[str, Rows]
"""Column → the key of a row → its value, in which floats are their bits."""


@dataclass(frozen=True)
class Made:
    """A table that a job made, and the rows that it set aside."""

    table: FeatureTable
    rejected: list[tuple[int, str]]
    """The line or the key of each row that was set aside, with the reason."""


def try_seed(seed: int, folder: Path) -> list[str]:
    """What differs between the ways at this seed."""
    has_rules = seed % (2 * SPARK_EVERY) == SPARK_EVERY
    case = drawn(seed, folder, amounts=seed % 3 != 0, rules=has_rules)
    engine, spark = ("Spark", session()) if has_rules else ("local", None)
    path = case.write()
    (folder / "etl.toml").write_text(case.etl())
    (folder / "loader.toml").write_text(case.loader())
    findings: list[str] = []

    def attempt(what: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            findings.append(
                f"{what} fails: {type(error).__name__}: {str(error)[:400]} "
                f"({Path(where.filename).name}:{where.lineno})"
            )
            return None

    whole = attempt(f"the {engine} job", lambda: made(spark, case.etl(), path, folder / "etl"))
    left = attempt(
        f"the {engine} job that leaves operators",
        lambda: made(spark, case.loader(), path, folder / "left"),
    )
    if whole is None or left is None:  # both may refuse all rows
        return (
            []
            if [f" {case.count} of {case.count} rows " in finding for finding in findings]
            == [True, True]
            else findings
        )
    want, chains = stored(whole.table), chains_of(case)
    if whole.rejected != left.rejected:
        findings.append(
            f"the rows that are set aside differ: {whole.rejected[:9]} or, with operators left, "
            f"{left.rejected[:9]}"
        )
    if seed % SPARK_EVERY == 0 and not has_rules:
        text, local = random.Random(seed).choice([(case.etl(), whole), (case.loader(), left)])
        spark = attempt("the Spark job", lambda: made(session(), text, path, folder / "spark"))
        if spark is not None:
            findings += differences("Spark", stored(local.table), stored(spark.table), chains)
            if spark.rejected != local.rejected:
                findings.append(
                    f"Spark sets other rows aside: {spark.rejected[:9]}, not {local.rejected[:9]}"
                )
    kept = finite_rows(whole.table, want)
    want = {name: {key: values[key] for key in kept} for name, values in want.items()}
    if (
        case.form == "parquet"
        and case.time is None
        and not case.misfits(range(case.count), list(case.inputs))
    ):
        loaded = attempt(
            "the loader of the file", lambda: load(plain(case, path), folder, random.Random(seed))
        )
        if loaded is not None:
            findings += differences(
                "the loader of the file",
                want,
                {
                    name: {key: values[key] for key in kept if key in values}
                    for name, values in loaded.items()
                },
                chains,
            )
    loaded = attempt("the loader", lambda: load(left.table, folder, random.Random(seed)))
    if loaded is not None:
        findings += differences(
            "the loader", want, {name: loaded[name] for name in want if name in loaded}, chains
        )
    findings += (
        attempt("the server", lambda: of_server(case, left.table, want, loaded or {}, chains)) or []
    )
    findings += (
        attempt("the server's refusals", lambda: not_refused(case, whole, left.table, kept)) or []
    )
    return findings


# ---- the ways


def made(spark: Any, text: str, path: Path, output: Path) -> Made:
    spec = Spec.own(text)
    job = Job(
        spec=spec,
        inputs=(str(path),),
        store=TableStore(output),
        max_rejects=1.0,
        accept_nulls=tuple(spec.input.columns),
        rejects=str(output.with_suffix(".rejects")),
    )
    on(spark, job)
    rows = (
        [
            json.loads(line)
            for file in sorted(Path(str(job.rejects)).rglob("part-*.json"))
            for line in file.read_text().split("\n")
            if line
        ]
        if Path(str(job.rejects)).exists()
        else []
    )
    rejected = sorted(
        (row.get("line") or json.loads(row["raw"])[KEY], row["reason"]) for row in rows
    )
    return Made(FeatureTable.open(output, allow_code=[MODULE]), rejected)


def bits(values: np.ndarray[Any, Any]) -> list[Any]:
    """Values that equal each other only if their bits do; all NaN are one."""
    if values.dtype.kind != "f":
        return values.tolist()
    return (
        np.where(np.isnan(values), values.dtype.type("nan"), values)
        .view(f"i{values.itemsize}")
        .tolist()
    )


def stored(table: FeatureTable) -> Columns:
    """What the files of a table hold."""
    whole = pa.concat_tables(
        [pq.read_table(file.path, partitioning=None) for file in table.files]
    ).combine_chunks()
    keys = whole[KEY].to_numpy().astype(int).tolist()
    columns = {}
    for field in table.stored:
        column = whole[field.name]
        values = (
            [tuple(np.frombuffer(bag, "<u4").tolist()) for bag in column.to_pylist()]
            if field.layout == "bytes"
            else bits(column.to_numpy().astype(np.float32))  # as a batch has it
            if field.role == "label"
            else bits(column.to_numpy())
            if pa.types.is_floating(column.type) and not column.null_count
            else [repr(value) for value in column.to_pylist()]
            if field.nullable
            else [
                tuple(value) if isinstance(value, list) else value for value in column.to_pylist()
            ]
        )
        columns[field.name] = dict(zip(keys, values, strict=True))
    return columns


def load(table: FeatureTable | ParquetFiles, folder: Path, draw: random.Random) -> Columns:
    """What batches hold of a table; rows that a batch cannot hold are set aside."""
    columns: dict[str, Rows] = {}
    others = [field.name for field in table.fields if field.role in ("label", "weight")]
    for split in ("all",) if isinstance(table, ParquetFiles) else table.splits:
        how: dict[str, Any] = draw.choice([{"reader": "arrow"}, {"reader": "petastorm"}])
        errors = Errors(
            on_error="quarantine", max_rate=1.0, quarantine=folder / f"aside-{split}.jsonl"
        )
        with open_loader(
            table,
            split=split,
            batch_size=_BATCH,
            last="pad",
            errors=errors,
            window_rows=draw.choice([None, 32]),
            **how,
        ) as loader:
            for batch in loader:
                there = np.flatnonzero(batch.weight.numpy() > 0)
                keys = batch[KEY].numpy()[there].astype(int).tolist()
                for name in (*loader.dense_names, *loader.sparse_names, *others):
                    column = batch[name]
                    values = (
                        _bags(column.values.numpy(), column.lengths.numpy())
                        if isinstance(column, BagColumn)
                        else bits(column.numpy())
                    )
                    columns.setdefault(name, {}).update(
                        zip(keys, (values[n] for n in there), strict=True)
                    )
    return columns


def plain(case: Case, path: Path) -> ParquetFiles:
    """The file itself, with those columns of the spec that learn nothing. A loader refuses a file whose values mostly
    cannot be read, so operators that read are left out, too."""
    spec = Spec.parse(case.etl())
    columns = [
        column.name
        for column in spec.columns
        if not any(op.reads or isinstance(op, Fitted | Python) for op in column.ops)
        and case.inputs.keys() >= {*column.sources}
    ]
    return ParquetFiles.open(str(path), spec=Spec.own(case.plain(columns)), say=lambda _: None)


def _bags(values: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
    return [tuple(part.tolist()) for part in np.split(values, np.cumsum(lengths)[:-1])]


class BadRows(Exception):
    """The problems of a server's rows, by number."""


class Server:
    """What a server does with a request before its model."""

    def __init__(self, case: Case, table: FeatureTable) -> None:
        tables = tables_of(table.fields, ModelConfig(), profile_of(table))
        self._case, self._model = case, servable(table, *tables)
        self._decoder = Decoder(table.spec(), "", most_rows=10**6)
        self._bags = {field.name for field in table.fields if field.role == "id_list"}

    def features(self, keys: list[int], draw: random.Random) -> Columns:
        """What it makes of these rows. Refusal or BadRows if it answers with 422."""
        asked = self._case.request([key - 1 for key in keys], draw)
        batch = self._model.batch(decoded(self._decoder, asked), problems := {})
        if problems:
            raise BadRows(problems)
        by_column = {
            name: dict(zip(keys, bits(batch.dense[:, place].numpy()), strict=True))
            for place, name in enumerate(self._model.meta.dense)
        }
        columns = self._model.layout.columns
        lengths = batch.lengths.numpy().reshape(len(columns), -1)
        ends = np.cumsum(lengths.sum(axis=1))[:-1]
        for column, counts, values in zip(
            columns, lengths, np.split(batch.values.numpy(), ends), strict=True
        ):
            ids = _bags(values, counts) if column.name in self._bags else values.tolist()
            by_column[column.name] = dict(zip(keys, ids, strict=True))
        return by_column

    def too_old(self, problems: Mapping[int, str]) -> set[int]:
        """Those rows that are refused since they have no time, or as others of their time or later ones have taken the
        place of what they may see."""
        times = {row + 1: time for row, time in enumerate(self._case.rows["at"])}
        latest = max((time for time in times.values() if isinstance(time, int)), default=0)
        return {
            key
            for key, text in problems.items()
            if (times[key] is None and "'at' is missing, and '" in text)
            or (times[key] is not None and times[key] < latest and "send a time after" in text)
        }


# ---- the comparison


def chains_of(case: Case) -> dict[str, str]:
    """The operators of each column, those that are left to the loader behind a bar."""
    spec = Spec.parse(case.loader())
    return {
        column.name: f"{'+'.join(column.sources)}: {' '.join(op.name for op in column.left_to_spark)}"
        f"{'' if column.online is None else ' | '}"
        f"{'' if column.online is None else ' '.join(op.name for op in column.ops[column.online :])}"
        for column in spec.columns
    }


def differences(
    way: str, want: Mapping[str, Rows], got: Mapping[str, Rows], chains: Mapping[str, str]
) -> list[str]:
    findings = []
    for name, values in got.items():
        if values.keys() != want[name].keys():
            findings.append(
                f"{way}: has other rows, {sorted(values.keys() ^ want[name].keys())[:9]}"
            )
            break
        wrong = [key for key, value in values.items() if value != want[name][key]]
        if wrong:
            shown = ", ".join(
                f"row {key}: {values[key]} and not {want[name][key]}" for key in wrong[:_MOST_SHOWN]
            )
            findings.append(
                f"{way}: column {name} ({chains.get(name, 'a transform')}) differs in {len(wrong)} rows: "
                f"{shown}"
            )
    return findings


def finite_rows(table: FeatureTable, want: Columns) -> list[int]:
    """The rows whose numbers are finite, so that a batch can hold them."""
    dense = [field.name for field in table.fields if field.role == "dense"]
    keys = np.array(list(want[KEY]), int)
    numbers = np.array([[want[name][key] for key in keys] for name in dense], np.int32).view(
        np.float32
    )
    return keys[np.isfinite(numbers).all(axis=0)].tolist() if len(keys) else []


def of_server(
    case: Case, table: FeatureTable, want: Columns, loaded: Columns, chains: Mapping[str, str]
) -> list[str]:
    """What the server makes otherwise. A row of the training split knows its own label's fold, and its own moment, in
    the ETL alone, so such columns are compared in the rows of the other splits."""
    keys = [key for key in want[KEY] if case.fits_json(key - 1)]
    if not keys:
        return []
    spec = parsed(case, case.entries)
    assert spec is not None
    by_row = {column.name for column in spec.columns if any(op.needs for op in column.ops)}
    trained: set[int] = set()
    if spec.table.training in table.splits:
        trained = set(stored(replace(table, files=table.files_of(spec.table.training)))[KEY])
    got = _features(Server(case, table), keys, case.seed, by_row, trained)
    made_of = {
        field.name: {field.name, *field.inputs} for field in table.fields if field.transforms
    }
    findings = []
    for name, values in got.items():
        reference = want if name in want and name not in made_of else loaded
        if name not in reference:
            continue
        hidden = trained if by_row & made_of.get(name, {name}) else set()
        rows = {key: value for key, value in values.items() if key not in hidden}
        findings += differences(
            "the server", {name: {key: reference[name][key] for key in rows}}, {name: rows}, chains
        )
    return findings


def _features(
    server: Server, keys: list[int], seed: int, by_row: set[str], trained: set[int]
) -> Columns:
    """What the server makes of the rows, without those of the training split in which it makes a number too large of
    all that such a column learned, and without those that are older than its state or have no time."""
    try:
        return server.features(keys, random.Random(seed))
    except BadRows as error:
        problems = {keys[row]: text for row, text in error.args[0].items()}
    wrong = server.too_old(problems)
    if not wrong:
        first, text = next(iter(problems.items()))
        if first not in trained or not any(f"feature {name!r}:" in text for name in by_row):
            raise BadRows(problems)
        wrong = {first}
    kept = [key for key in keys if key not in wrong]
    return _features(server, kept, seed, by_row, trained) if kept else {}


def not_refused(case: Case, whole: Made, table: FeatureTable, kept: list[int]) -> list[str]:
    """Rows that the job sets aside, or whose numbers no batch holds, and that the server answers all the same."""
    spec = table.spec()
    needed = sorted(needed_columns(spec) & case.inputs.keys())
    server, findings = Server(case, table), []
    misfits = [row + 1 for row in case.misfits(range(case.count), needed)]
    if held := set(misfits) & set(kept):
        findings.append(
            f"rows {sorted(held)} are in the table, and one of their values fits no column"
        )
    beyond = sorted(set(stored(whole.table)[KEY]) - set(kept))
    for keys in (misfits, beyond):
        for key in [key for key in keys if case.fits_json(key - 1)][:_MOST_REFUSED]:
            findings += _answered(case, server, key)
    return findings


def _answered(case: Case, server: Server, key: int) -> list[str]:
    try:
        server.features([key], random.Random(key))
    except BadRows:
        return []
    except Refusal as refusal:
        if refusal.status == 422:
            return []
        return [f"the server refuses row {key} with {refusal.status}, not 422: {refusal}"]
    row = {name: values[key - 1] for name, values in case.rows.items() if name != LABEL}
    return [f"the server answers row {key}, which the table does not hold: {row}"]
