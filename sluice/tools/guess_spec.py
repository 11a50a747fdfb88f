"""Writes a spec for plain Parquet or text logs, as a start to edit: `guessed_spec`."""

from __future__ import annotations

import datetime
import os
import zoneinfo
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from sluice.common.errors import UsageError
from sluice.common.suggest import nearest
from sluice.etl.read.log_sample import LogSample, text_files
from sluice.etl.spec.columns import free_name
from sluice.etl.spec.nested_columns import is_text
from sluice.etl.spec.toml_keys import quoted, toml_texts
from sluice.etl.table.table_files import is_iceberg
from sluice.ingest.columns import ColumnError
from sluice.ingest.plain.column_kind import spread_of
from sluice.ingest.plain.guess import (
    Proposal,
    label_values,
    proposals,
    user_of,
    usual_label,
)
from sluice.ingest.plain.probe import ColumnFacts, facts_text
from sluice.ingest.plain.recipe import check_kind
from sluice.ingest.plain.roles import label_of
from sluice.ingest.plain.time_guess import TimeGuess, TimeReading
from sluice.ingest.read.source_files import Paths, facts_of

_HEAD = """\
# `sluice guess` wrote this spec from names, types and a few rows. Read it, and change what is wrong.
#   Loader(FILES, spec="this file", batch_size=8192)      loads the files as they are
#   sluice etl --spec "this file" --input … --output …    makes a feature table, and can also learn vocabularies
"""
_HEAD_OF_TEXT = """\
# `sluice guess` wrote this spec from names and a few rows. Read it, and change what is wrong.
#   sluice etl --spec "this file" --input … --output …    makes a feature table for the Loader
"""
TWO_READINGS = "# Two readings: "
"""How the comment on a time that has two readings begins."""
_SPLIT_COLUMNS = 4
"""The number of columns that decide the split of plain Parquet without times and users."""


def spec_text(
    proposed: Mapping[str, Proposal],
    others: Mapping[str, str],
    form: str,
    logs: LogSample | None,
) -> str:
    """Returns the spec. Its comments describe each column. `others` has the reasons why columns were left out. `logs`
    is given for text files. `form` is the format of the files."""
    proposed = {name: _leave_out_unreadable(proposal) for name, proposal in proposed.items()}
    used = {name: proposal for name, proposal in proposed.items() if proposal.role}
    why = {name: proposal.why for name, proposal in proposed.items() if name not in used} | {
        **others
    }
    inputs, kinds = list[str](), dict[str, str]()
    # For CSV and TSV, the spec must name all columns of a line.
    for name, proposal in (proposed if form in ("csv", "tsv") else used).items():
        is_time = _is_time_of_job(proposal, logs)
        has_texts = bool(proposal.rejected) and form != "json"
        kinds[name] = "float" if is_time else _input_type(proposal, has_texts=has_texts)
        typed = quoted(f"{name}:{kinds[name]}")
        if is_time:
            typed = f"{{name = {typed}, format = {toml_texts(proposal.formats)}}}"
        inputs.append(typed)
    lines = [
        _HEAD_OF_TEXT if logs else _HEAD,
        "[input]",
        f'format = "{form}"',
        *(logs.marks() if logs else ()),
        "columns = [" + ",\n           ".join(inputs) + "]",
    ]
    formats = [form for p in used.values() if p.role == "time" for form in p.formats]
    if any(form[-1] not in "zZ" for form in formats):
        lines.append(
            "# Texts that name no zone are read as times in UTC. For another zone, write for instance "
            'zone = "Europe/Berlin" next to format.'
        )
    if optional := [n for n, p in used.items() if p.facts.optional and p.role != "label"]:
        lines += [
            "# Some files lack these columns. Their values are null there.",
            f"optional = {quoted(optional)}",
        ]
    if why:
        lines += ["# Left out:", *(f"#   {name}: {reason}" for name, reason in why.items())]
    for name, proposal in proposed.items():
        if proposal.role in ("", "time") and (guess := proposal.guess) and guess.other:
            in_columns = bool(logs) and is_text(proposal.facts.type)
            lines += _write_readings(name, guess, in_columns=in_columns)
    lines += ["", "[table]", *_write_splits(proposed, logs), ""]
    taken = {name.lower() for name in proposed}
    for name, proposal in used.items():
        if proposal.rejected:
            lines.append(_write_rejects(proposal, kinds[name]))
        lines += _write_columns(proposal, free_name(name, proposed, used, taken), logs)
    return "\n".join(lines).rstrip() + "\n"


def _is_time_of_job(proposal: Proposal, logs: LogSample | None) -> bool:
    """Whether the job makes seconds since 1970 of the column's texts, before operators get them."""
    return bool(logs) and proposal.role == "time" and is_text(proposal.facts.type)


def _write_readings(name: str, guess: TimeGuess, *, in_columns: bool) -> Iterator[str]:
    """Yields the comment on a time that has two readings. The job reads it `in_columns`, or an operator does."""
    assert guess.other
    formats = [toml_texts(reading.formats) for reading in (guess.reading, guess.other)]
    if guess.reason:
        yield (
            f"{TWO_READINGS}{name}: {guess.example}. It is read by {formats[0]} and not by {formats[1]}, because "
            f"{guess.reason}."
        )
        return
    yield f"{TWO_READINGS}{name}: {guess.example}, and nothing in the sample decides. No column is made of it."
    place = "columns" if in_columns else "ops of a column that is made of it"
    yield f"# Put one of these into {place}:"
    for form in formats:
        read = f"name = {quoted(f'{name}:float')}" if in_columns else 'op = "parse_time"'
        yield f"#   {{{read}, format = {form}}}"


def _leave_out_unreadable(proposal: Proposal) -> Proposal:
    """Returns the proposal, without a role if no type of a spec reads the column."""
    if proposal.role:
        try:
            check_kind(proposal.name, proposal.facts.type, _input_type(proposal, has_texts=False))
        except ColumnError:
            why = f"{proposal.facts.type}, which a spec cannot read; a Loader without a spec can"
            return replace(proposal, role="", why=why)
    return proposal


def _write_rejects(proposal: Proposal, kind: str) -> str:
    """Returns the comment on the few values that do not fit a column."""
    is_time = proposal.role == "time"
    wrong = "Not a time" if is_time else "Not a number"
    if proposal.role == "label":
        wrong = "Neither 0 nor 1"
    effect = "`sluice etl` rejects and counts such lines."
    if kind == "text":
        is_missing = "They become missing values, which `sluice etl` counts as unread."
        effect = is_missing if is_time else "They are ids, too."
    return f"# {wrong}: {proposal.rejected}. {effect}"


def _input_type(proposal: Proposal, *, has_texts: bool) -> str:
    """Returns the type of an input column of a spec. Ids are texts if some are (`has_texts`)."""
    kind = proposal.facts.type
    if proposal.role == "label":
        if is_text(kind):
            return "text"
        if pa.types.is_boolean(kind):  # footers and samples may have no range of it
            return "int"
        is_click = proposal.label == proposal.name and (
            proposal.rejected
            or not proposal.facts.values
            or 0 <= proposal.facts.low <= proposal.facts.high <= 1
        )
        return "int" if is_click and not pa.types.is_floating(kind) else "float"
    if proposal.role == "time" and not is_text(kind):
        return "int" if pa.types.is_integer(kind) else "float"
    if proposal.role in ("dense", "weight") or (pa.types.is_floating(kind) and not has_texts):
        return "float"
    if proposal.role == "id_list":
        return "texts"
    # Decimals have a role of ids only if they are whole.
    is_whole = pa.types.is_decimal(kind) or (pa.types.is_integer(kind) and kind != pa.uint64())
    return "int" if is_whole and not has_texts else "text"


def _write_splits(proposed: Mapping[str, Proposal], logs: LogSample | None) -> Iterator[str]:
    """Yields the lines on splits. Rows are split by the first time column whose end is known, else by the user, else by
    rows."""
    if any(proposal.role == "label" and proposal.facts.nulls for proposal in proposed.values()):
        yield "# Rows without a label go to a separate split. Nothing is trained on them."
        yield 'unlabelled = "ask"'
    for name, proposal in proposed.items() if logs is None or logs.is_complete else ():
        if lines := _split_by_time(name, proposal, logs):
            yield from lines
            return
    by = list[str]()
    if user := user_of(proposed):
        by = [user]
        yield "# Rows with the same value in this column go to the same split."
    elif logs is None:
        # A loader would have to read every column for the hash of a whole row.
        distinct = {
            name: proposal.facts.distinct
            for name, proposal in proposed.items()
            if proposal.role in ("dense", "sparse") and not proposal.facts.optional
        }
        by = sorted(distinct, key=lambda name: -distinct[name])[:_SPLIT_COLUMNS]
        yield "# Rows with the same values in all of these columns go to the same split."
    else:
        yield "# A hash of the whole row chooses its split. To split by columns or by time, add split_by or split_time."
    if by:
        yield f"split_by = {toml_texts(by)}"
    yield "split = {train = 0.8, validation = 0.1, test = 0.1}"


def _split_by_time(name: str, proposal: Proposal, logs: LogSample | None) -> list[str]:
    """Returns the lines that split rows by a time. Empty if the column does not show where its times end."""
    facts, guess, is_stored = proposal.facts, proposal.guess, not is_text(proposal.facts.type)
    if (
        not (proposal.role == "time" and guess and (is_stored or logs))
        or facts.low is None
        or facts.nulls
        or facts.optional
    ):
        return []
    # A job has made seconds of texts.
    reading = guess.reading if is_stored else TimeReading()
    start, end = reading.times(pa.array([facts.low, facts.high], facts.type if is_stored else None))
    times = guess.reading.seconds(facts.sampled).drop_null().to_numpy()
    first, second = np.array_split(times, 2)
    if first.max(initial=start) > second.min(initial=end):
        # The rows are not in the order of time, so the sample has times from the whole range.
        moments = np.quantile(times, [0.8, 0.9])
    else:
        moments = start + (end - start) * np.array([0.8, 0.9])
    low, validation, test, high = (
        int(f"{_utc(at):{reading.formats[0]}}") if reading.formats else int(at * reading.unit)
        for at in (start, *moments, end)
    )
    if not low < validation < test <= high:
        return []
    begin = [f"{_utc(at):%Y-%m-%d %H:%M} UTC" for at in reading.times(pa.array([validation, test]))]
    return [
        f"# The training split is the past. Validation begins at {begin[0]}, test at {begin[1]}.",
        "# Rows of later days go to test. To train on them, raise both bounds.",
        f"split_time = {quoted(name)}",
        f"split = {{train = {min(0, low)}, validation = {validation}, test = {test}}}",
    ]


def _utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _write_columns(proposal: Proposal, name: str, logs: LogSample | None) -> Iterator[str]:
    """Yields the lines of a column. A time becomes several columns."""
    seen = f"# {facts_text(proposal.facts)}"
    if proposal.label not in ("", proposal.name) and proposal.facts.sampled is not None:
        counts = proposal.facts.sampled.drop_null().value_counts().to_pylist()
        seen += "".join(f", {row['counts']:,} with {row['values']}" for row in counts)
        labels = label_values(proposal.name, proposal.facts, proposal.label)
        if len(several := np.unique(labels[~np.isnan(labels)])) == 1:
            seen += f"\n# All of these rows get the label {several[0]:g}."
    if proposal.role == "time":
        read, has_clock = list[str](), not pa.types.is_date(proposal.facts.type)
        if proposal.formats:
            has_clock = any("%H" in form for form in proposal.formats)
            if not _is_time_of_job(proposal, logs):
                read = [f'{{op = "parse_time", format = {toml_texts(proposal.formats)}}}']
        elif proposal.guess and proposal.guess.reading.unit > 1:
            read = [f'{{op = "scale", by = {proposal.guess.reading.unit}}}']
        named = getattr(proposal.facts.type, "tz", None)
        zone = f', zone = "{named}"' if named in zoneinfo.available_timezones() - {"UTC"} else ""
        made = {
            f"{name}_{part}": [
                *read,
                f'{{op = "{part}"{zone}}}',
                f'{{op = "modulus", size = {size}}}',
            ]
            for part, size in ([("hour", 24)] if has_clock else []) + [("weekday", 7)]
        }
    else:
        made = {name: _write_operators(proposal, learns=logs is not None)}
    role = "sparse" if proposal.role == "time" else proposal.role
    for column, operators in made.items():
        yield from (seen, "[[column]]", f"name = {quoted(column)}")
        if column != proposal.name:
            yield f"from = {quoted(proposal.name)}"
        yield f'role = "{role}"'
        if operators:
            yield f"ops = [{', '.join(operators)}]"
        yield ""


def _write_operators(proposal: Proposal, *, learns: bool) -> list[str]:
    """Returns a column's operators. Those that learn from data are only for tables that a job makes."""
    if proposal.role == "weight":
        return ['{op = "fill"}']
    if proposal.role == "dense":
        operators = ['{op = "fill"}']
        spread = None if pa.types.is_boolean(proposal.facts.type) else spread_of(proposal.facts)
        # A model's first steps fail on large numbers, so these operators bring them near 0.
        if spread and spread.is_skewed:
            operators.append(f'{{op = "log", shift = {1 - min(0, spread.low):.6g}, floor = 1}}')
        if spread and spread.limits:
            low, high = spread.limits
            operators.append(f'{{op = "clip", low = {low:.6g}, high = {high:.6g}}}')
        if spread:
            # A loader learns nothing, so the mean and the deviation of the sample are used.
            scale = f'{{op = "scale", minus = {spread.mean:.6g}, by = {spread.deviation:.6g}}}'
            operators.append('{op = "standardise"}' if learns else scale)
        return operators
    if proposal.role == "label":
        _, made = label_of(proposal.label, {proposal.name: proposal.facts.type})
        return [
            f"{{{', '.join(f'{name} = {quoted(value)}' for name, value in op.described.items())}}}"
            for op in made
        ]
    return [f'{{op = "hash", size = {proposal.size}}}']


def guessed_spec(source: Paths, label: str | None = None, exclude: Collection[str] = ()) -> str:
    """Returns a spec for these files as TOML. It has the roles that `ParquetFiles.open` guesses, and more. The columns
    in `exclude` are left out."""
    is_table = isinstance(source, str) and is_iceberg(source)
    sources = [source] if isinstance(source, (str, os.PathLike)) else source
    logs = None
    if is_table or not (files := text_files(os.fspath(file) for file in sources)):
        facts, rows, others, form = facts_of(source)
    else:
        logs = LogSample.of(files)
        label = label or usual_label(logs.cells) or logs.clicks
        logs = logs.typed(label)
        rows, form, others = logs.rows, logs.form, dict(logs.others)
        facts = {
            name: ColumnFacts.of_log(values, logs.texts.get(name), logs.places)
            for name, values in logs.columns.items()
        }
    proposed = proposals(facts, rows, label, is_click=True)
    for name in exclude:
        if name not in proposed:
            raise UsageError(f"--exclude {name}: there is no such column{nearest(name, proposed)}")
        if proposed[name].role == "label":
            raise UsageError(f"--exclude {name}: it is the label; name another one with --label")
        proposed[name] = replace(proposed[name], role="", why="by --exclude")
    return spec_text(proposed, others, form, logs)
