"""Reads plain Parquet, or logs in lines of text, and writes a spec for them to edit: `sluice guess FILES`."""

from __future__ import annotations

import datetime
import itertools
import json
import sys
import tempfile
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.common.errors import UsageError
from sluice.common.settings import parse, setting
from sluice.etl.ops.numeric import Compare, OneHot
from sluice.etl.ops.timestamps import ParseTime
from sluice.etl.spec.columns import is_the_tables_own
from sluice.etl.spec.input_values import converted
from sluice.etl.spec.spec import Spec
from sluice.ingest.plain.column_kind import Spread
from sluice.ingest.plain.guess import Proposal, is_text, proposals, user_of
from sluice.ingest.plain.probe import facts_text
from sluice.ingest.plain.roles import label_of
from sluice.ingest.plain.text_logs import TextSample, text_paths
from sluice.ingest.read.parquet_files import ParquetFiles, Paths, facts_of

_EXAMPLES = """\
examples:
  sluice guess 'logs/*.parquet' > clicks.toml
  sluice guess logs --label 'stars >= 4' --out clicks.toml
  sluice bench logs --spec clicks.toml
  sluice guess 'exports/*.csv' --label bought > exports.toml
"""
_DESCRIPTION = (
    "Reads footers and a few rows, and writes a spec: roles, types, what is hashed, filled or made of "
    "times, and how rows are split, with what was seen of each column; of CSV, TSV and JSON "
    "lines also encoding, delimiter and header. sluice etl takes it as --spec, and of Parquet a Loader as "
    "spec=."
)
_HEAD = """\
# Guessed by `sluice guess` from names, types and a few rows: read it, and change what is wrong.
#   Loader(FILES, spec="this file", batch_size=8192)      loads the files as they are
#   sluice etl --spec "this file" --input … --output …    makes a table, which may also learn vocabularies
"""
_HEAD_OF_TEXT = """\
# Guessed by `sluice guess` from names and a few rows: read it, and change what is wrong.
#   sluice etl --spec "this file" --input … --output …    makes a table, which loaders take
"""
_SPLIT_COLUMNS = (
    4  # whose values decide the split of plain Parquet that has neither times nor users
)


def spec_text(
    found: Mapping[str, Proposal], others: Mapping[str, str], sample: TextSample | None = None
) -> str:
    """Returns the spec. Comments say what was found in each column. `others` has the reasons why columns were left out.
    `sample` is the sample of text files."""
    used = {name: one for name, one in found.items() if one.role or one.time}
    why = {name: one.why for name, one in found.items() if name not in used} | dict(others)
    left = [f"#   {name}: {reason}" for name, reason in why.items()]
    form, keys, times = (sample.form, sample.keys, sample.times) if sample else ("parquet", {}, {})
    named = found if form in ("csv", "tsv") else used  # all that lie in a line
    times = {name: forms for name, forms in times.items() if name in used}
    inputs = ",\n           ".join(_input(one, times.get(name, ())) for name, one in named.items())
    lines = [
        _HEAD if form == "parquet" else _HEAD_OF_TEXT,
        "[input]",
        f'format = "{form}"',
        *(f"{key} = {json.dumps(said)}" for key, said in keys.items()),
        f"columns = [{inputs}]",
    ]
    if any(
        form[-1] not in "zZ"
        for one in (*times.values(), *(one.formats for one in used.values()))
        for form in one
    ):
        lines.append(
            '# Texts that name no zone are read as times in UTC; zone = "Europe/Berlin" next to format says '
            "another."
        )
    if optional := [
        name for name, one in used.items() if one.facts.optional and one.role != "label"
    ]:
        lines += [
            "# Not in every file, and null where they are missing:",
            f"optional = {json.dumps(optional, ensure_ascii=False)}",
        ]
    if left:
        lines += ["# Left out:", *left]
    lines += ["", "[table]", *_split(found, sample)]
    if any(one.role == "label" and one.facts.nulls for one in used.values()):
        lines += [
            "# Rows without a label lie in a split of their own; nothing is trained on them.",
            'unlabelled = "ask"',
        ]
    lines += [""]
    taken = {name.lower() for name in found}
    for one in used.values():
        plain = one.name.replace(".", "_")  # a model's table has no dot in its name
        name = one.name if plain in found else plain
        alike = [other for other in used if other.lower() == one.name.lower()]
        if one.name != alike[0] or is_the_tables_own(
            name
        ):  # no table tells names apart by their case alone
            name = name.strip("_") or "column"
            name = next(
                f"{name}_{n}" for n in itertools.count(2) if f"{name}_{n}".lower() not in taken
            )
            taken.add(name.lower())
        lines += _columns(one, name, learns=form != "parquet")
    return "\n".join(lines).rstrip() + "\n"


def _input(one: Proposal, formats: Sequence[str]) -> str:
    """Returns a column of `[input]`."""
    name = json.dumps(f"{one.name}:{_type(one)}", ensure_ascii=False)
    return f"{{name = {name}, format = {toml_texts(formats)}}}" if formats else name


def toml_texts(several: Sequence[str]) -> str:
    """Returns one text, or a list of several, in TOML."""
    return json.dumps(several[0] if len(several) == 1 else list(several), ensure_ascii=False)


def _type(one: Proposal) -> str:
    """Returns the type of an input column of a spec."""
    kind = one.facts.type
    if one.role == "label":
        if is_text(one.facts):
            return "text"
        click = not one.facts.values or 0 <= one.facts.low <= one.facts.high <= 1
        return (
            "int"
            if pa.types.is_boolean(kind) or (click and not pa.types.is_floating(kind))
            else "float"
        )
    if one.time:
        return one.time
    if one.role in ("dense", "weight") or pa.types.is_floating(kind):
        return "float"
    fits = pa.types.is_integer(kind) and kind != pa.uint64()
    if one.role == "id_list":
        return "texts"
    if fits:
        return "int"
    return "text"


def _split(found: Mapping[str, Proposal], sample: TextSample | None) -> Iterator[str]:
    """Returns how rows are split: by the first time column whose end is known, else by the user, else by rows."""
    for name, one in found.items() if sample is None or sample.whole else ():
        if bounds := _time_bounds(one):
            first, second = (
                f"{datetime.datetime.fromtimestamp(_seconds(at, one), datetime.UTC):%Y-%m-%d %H:%M}"
                for at in bounds[1:]
            )
            yield f"# Trained on the past: validation begins at {first}, test at {second} (UTC)."
            yield f"split_time = {json.dumps(name, ensure_ascii=False)}"
            yield f"split = {{train = {bounds[0]}, validation = {bounds[1]}, test = {bounds[2]}}}"
            return
    user = user_of(found)
    by = [user] if user is not None and (found[user].role or found[user].time) else []
    if by:
        yield "# All rows of one value of this column lie in one split."
    elif sample is None:
        # A loader would have to read every column for the hash of a whole row.
        features = [
            one
            for one in found.values()
            if one.role in ("dense", "sparse") and not one.facts.optional
        ]
        by = [
            one.name
            for one in sorted(features, key=lambda one: -one.facts.distinct)[:_SPLIT_COLUMNS]
        ]
        yield "# Rows that agree in all of these lie in one split."
    else:
        yield "# A row's hash decides; with split_by or split_time other things do."
    if by:
        yield f"split_by = {json.dumps(by[0] if len(by) == 1 else by, ensure_ascii=False)}"
    yield "split = {train = 0.8, validation = 0.1, test = 0.1}"


def _time_bounds(one: Proposal) -> tuple[int, int, int] | None:
    """Returns when training, validation and test begin. None: the column does not show it."""
    if (
        one.time not in ("int", "float")
        or one.facts.low is None
        or one.facts.nulls
        or one.facts.optional
    ):
        return None
    low, high = (_number(value, one) for value in (one.facts.low, one.facts.high))
    times, _ = converted(one.facts.sampled, "float")
    times = times.to_numpy()
    middle = len(times) // 2
    if len(times) and times[:middle].max(initial=low) > times[middle:].min(initial=high):
        bounds = [
            int(at) for at in np.quantile(times, [0.8, 0.9])
        ]  # rows lie in any order: the sample is like all
    else:
        start, end = (_seconds(at, one) for at in (low, high))
        bounds = [_stamp(start + (end - start) * share, one) for share in (0.8, 0.9)]
    return (min(0, int(low)), bounds[0], bounds[1]) if low < bounds[0] < bounds[1] <= high else None


def _number(value: object, one: Proposal) -> float:
    number, _ = converted(pa.array([value], one.facts.type), "float")
    return float(number[0].as_py())


def _seconds(number: float, one: Proposal) -> float:
    """Returns the seconds since 1970 for a number of a column."""
    if not one.formats:
        return number / one.unit
    return float(ParseTime(format=one.formats).apply(pa.array([str(int(number))]), None)[0].as_py())


def _stamp(seconds: float, one: Proposal) -> int:
    """Returns the number with which a column writes a time."""
    if not one.formats:
        return int(seconds * one.unit)
    return int(f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):{one.formats[0]}}")


def _columns(one: Proposal, name: str, *, learns: bool) -> list[str]:
    seen = f"# {facts_text(one.facts)}"
    if one.time:
        clock = (
            any("%H" in form for form in one.formats)
            if one.formats
            else not pa.types.is_date(one.facts.type)
        )
        if one.formats:
            read = [f'{{op = "parse_time", format = {toml_texts(one.formats)}}}']
        elif one.unit > 1:
            read = [f'{{op = "scale", by = {one.unit}}}']
        else:
            read = []
        named = getattr(one.facts.type, "tz", None)
        zone = f', zone = "{named}"' if named in zoneinfo.available_timezones() - {"UTC"} else ""
        return [
            line
            for part, size in ([("hour", 24)] if clock else []) + [("weekday", 7)]
            for line in _column(
                f"{name}_{part}",
                "sparse",
                [*read, f'{{op = "{part}"{zone}}}', f'{{op = "modulus", size = {size}}}'],
                seen,
                one.name,
            )
        ]
    return _column(
        name, one.role, _operators(one, learns=learns), seen, None if name == one.name else one.name
    )


def _operators(one: Proposal, *, learns: bool) -> list[str]:
    """Returns a column's operators. Those that learn from data are only for tables that a job makes."""
    if one.role == "weight":
        return ['{op = "fill"}']
    if one.role == "dense":
        return ['{op = "fill"}', *(_evened(one.spread, learns=learns) if one.spread else ())]
    if one.role == "label":
        _, made = label_of(one.label, {one.name: str(one.facts.type)})
        return [
            f'{{op = "one_hot", values = {json.dumps(op.values)}}}'
            if isinstance(op, OneHot)
            else f'{{op = "compare", to = {json.dumps(op.to)}}}'
            for op in made
            if isinstance(op, (OneHot, Compare))
        ]
    return [f'{{op = "hash", size = {one.size}}}']


def _evened(spread: Spread, *, learns: bool) -> Iterator[str]:
    """Returns operators that bring numbers near 0. A model's first steps fail on large numbers."""
    if spread.is_skewed:
        yield f'{{op = "log", shift = {1 - min(0, spread.low):.6g}, floor = 1}}'
    if spread.limits:
        yield f'{{op = "clip", low = {spread.limits[0]:.6g}, high = {spread.limits[1]:.6g}}}'
    if learns:
        yield '{op = "standardise"}'
    else:  # a loader learns nothing: the sample says the same
        yield f'{{op = "scale", minus = {spread.mean:.6g}, by = {spread.deviation:.6g}}}'


def _column(
    name: str, role: str, operators: list[str], seen: str, source: str | None = None
) -> list[str]:
    lines = [seen, "[[column]]", f"name = {json.dumps(name, ensure_ascii=False)}"]
    if source is not None:
        lines.append(f"from = {json.dumps(source, ensure_ascii=False)}")
    lines.append(f'role = "{role}"')
    if operators:
        lines.append(f"ops = [{', '.join(operators)}]")
    return [*lines, ""]


@dataclass(frozen=True, kw_only=True)
class GuessOptions:
    """The files, and where the spec is written."""

    files: tuple[str, ...] = setting(
        help="a folder, glob or files of Parquet, CSV, TSV or JSON lines",
        metavar="FILES",
        positional=True,
        several=True,
    )
    label: str | None = setting(
        None,
        "the column that is the label, or a comparison such as 'stars >= 4' (default: "
        "guessed by its name)",
        metavar="NAME",
    )
    out: str = setting("", "a new file for the spec (default: it is printed)", metavar="FILE")


def guessed_spec(source: Paths, label: str | None = None) -> str:
    """Returns a spec for these files as TOML: the guess of `ParquetFiles.open`, and more that a spec can express."""
    if not (paths := text_paths(source)):
        facts, rows, others = facts_of(source)
        return spec_text(proposals(facts, rows, label, is_click=True), others)
    sample = TextSample.of(paths)
    with tempfile.TemporaryDirectory(prefix="sluice-guess-") as folder:
        pq.write_table(
            sample.table, f"{folder}/rows.parquet", row_group_size=-(-sample.table.num_rows // 2)
        )
        facts, _, others = facts_of(f"{folder}/rows.parquet")
    found = proposals(facts, sample.rows, label or sample.label, is_click=True)
    return spec_text(found, {**others, **sample.others}, sample)


def main(argv: list[str]) -> None:
    options = parse(
        GuessOptions, argv=argv, prog="sluice guess", epilog=_EXAMPLES, description=_DESCRIPTION
    )
    files = options.files if len(options.files) > 1 else options.files[0]
    text = guessed_spec(files, options.label)
    # The job does this, too. The spec lists what is left out.
    if (spec := Spec.own(text, "the guessed spec")).input.format == "parquet":
        ParquetFiles.open(files, spec=spec, say=lambda _: None)
    if not options.out:
        print(text, end="")
        return
    try:
        with Path(options.out).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror}; name a new file") from None
    print(f"sluice: {options.out} is written: read it, and change what is wrong", file=sys.stderr)
