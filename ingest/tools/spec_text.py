"""Writes what was guessed of plain Parquet as a spec to edit: `spec_text`, TOML that jobs and loaders take."""

from __future__ import annotations

import datetime
import json
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from sluice.etl.ops.numeric import Compare, OneHot
from sluice.etl.spec.input_values import converted
from sluice.ingest.plain.guess import Proposal, user_of
from sluice.ingest.plain.probe import facts_text
from sluice.ingest.plain.roles import label_of
from sluice.ingest.plain.text_logs import TextSample

_HEAD = """\
# Guessed by `sluice guess` from names, types and a few rows: read it, and change what is wrong.
#   Loader(FILES, spec="this file", batch_size=8192)      loads the files as they are
#   sluice etl --spec "this file" --input … --output …    makes a table, which may also learn vocabularies
"""
_HEAD_OF_TEXT = """\
# Guessed by `sluice guess` from names and a few rows: read it, and change what is wrong.
#   sluice etl --spec "this file" --input … --output …    makes a table, which loaders take
"""
_MOST_ROOM = 10_000_000  # ids: whole numbers below are taken as they are, plus two


def spec_text(found: Mapping[str, Proposal], others: Mapping[str, str], sample: TextSample | None = None) -> str:
    """The spec, with what was seen of each column as a comment. `others` holds why columns were not looked at; `sample`
    is what was, if the files are text."""
    used = {name: one for name, one in found.items() if one.role or one.time}
    why = {name: one.why for name, one in found.items() if name not in used} | dict(others)
    left = [f"#   {name}: {reason}" for name, reason in why.items()]
    form, keys, times = (sample.form, sample.keys, sample.times) if sample else ("parquet", {}, {})
    named = found if form in ("csv", "tsv") else used  # all that lie in a line
    inputs = ",\n           ".join(_input(one, times.get(name, ())) for name, one in named.items())
    lines = [_HEAD if form == "parquet" else _HEAD_OF_TEXT, "[input]", f'format = "{form}"',
             *(f"{key} = {json.dumps(said)}" for key, said in keys.items()), f"columns = [{inputs}]"]
    if any(form[-1] not in "zZ" for one in (*times.values(), *(one.formats for one in used.values())) for form in one):
        lines.append("# Texts that name no zone are read as times in UTC; zone = \"Europe/Berlin\" beside format says "
                     "another.")
    if optional := [name for name, one in used.items() if one.facts.optional and one.role != "label"]:
        lines += ["# Not in every file, and null where they are missing:",
                  f"optional = {json.dumps(optional, ensure_ascii=False)}"]
    if left:
        lines += ["# Left out:", *left]
    lines += ["", "[table]", *_split(found, sample is None or sample.whole)]
    if any(one.role == "label" and one.facts.nulls for one in used.values()):
        lines += ["# Rows without a label lie in a split of their own; nothing is trained on them.",
                  'unlabelled = "ask"']
    lines += [""]
    for one in used.values():
        plain = one.name.replace(".", "_")  # a model's table has no dot in its name
        lines += _columns(one, one.name if plain in found else plain)
    return "\n".join(lines).rstrip() + "\n"


def _input(one: Proposal, formats: Sequence[str]) -> str:
    """A column of `[input]`."""
    name = json.dumps(f"{one.name}:{_type(one)}", ensure_ascii=False)
    return f"{{name = {name}, format = {toml_texts(formats)}}}" if formats else name


def toml_texts(several: Sequence[str]) -> str:
    """One text, or a list of several, as TOML has it."""
    return json.dumps(several[0] if len(several) == 1 else list(several), ensure_ascii=False)


def _type(one: Proposal) -> str:
    """The type of an input column of a spec."""
    kind = one.facts.type.value_type if pa.types.is_dictionary(one.facts.type) else one.facts.type
    if one.role == "label":
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return "text"
        click = not one.facts.values or 0 <= one.facts.low <= one.facts.high <= 1
        return "int" if pa.types.is_boolean(kind) or (click and not pa.types.is_floating(kind)) else "float"
    if one.time:
        return one.time
    if one.role in ("dense", "weight"):
        return "float"
    return "texts" if one.role == "id_list" else "int" if pa.types.is_integer(kind) else "text"


def _split(found: Mapping[str, Proposal], whole: bool) -> Iterator[str]:
    """How rows are split: by the first time that there is, if its end is known, else by the user, else not at all."""
    for name, one in found.items() if whole else ():
        if one.time not in ("", "text") and one.facts.low is not None and not (one.facts.nulls or one.facts.optional):
            low, high = (_number(value, one) for value in (one.facts.low, one.facts.high))
            bounds = [int(low + (high - low) * share) for share in (0.8, 0.9)]
            if low < bounds[0] < bounds[1]:
                first, second = (f"{datetime.datetime.fromtimestamp(at / one.unit, datetime.UTC):%Y-%m-%d %H:%M}"
                                 for at in bounds)
                yield f"# Trained on the past: validation begins at {first}, test at {second} (UTC)."
                yield f"split_time = {json.dumps(name, ensure_ascii=False)}"
                yield f"split = {{train = {min(0, int(low))}, validation = {bounds[0]}, test = {bounds[1]}}}"
                return
    user = user_of(found)
    if user is not None and (found[user].role or found[user].time):
        yield "# All rows of one value of this column lie in one split."
        yield f"split_by = {json.dumps(user, ensure_ascii=False)}"
        yield "split = {train = 0.8, validation = 0.1, test = 0.1}"
        return
    yield "# All rows are for training; with split_by or split_time there are others."
    yield "split = {train = 1}"


def _number(value: object, one: Proposal) -> float:
    number, _ = converted(pa.array([value], one.facts.type), "float")
    return float(number[0].as_py())


def _columns(one: Proposal, name: str) -> list[str]:
    seen = f"# {facts_text(one.facts)}"
    if one.time:
        clock = any("%H" in form for form in one.formats) if one.formats else not pa.types.is_date(one.facts.type)
        read = [f'{{op = "parse_time", format = {toml_texts(one.formats)}}}'] if one.formats else \
            [f'{{op = "scale", by = {one.unit}}}'] if one.unit > 1 else []
        named = getattr(one.facts.type, "tz", None)
        zone = f', zone = "{named}"' if named in zoneinfo.available_timezones() - {"UTC"} else ""
        return [line for part, size in ([("hour", 24)] if clock else []) + [("weekday", 7)] for line in
                _column(f"{name}_{part}", "sparse",
                        [*read, f'{{op = "{part}"{zone}}}', f'{{op = "modulus", size = {size}}}'], seen, one.name)]
    return _column(name, one.role, _operators(one), seen, None if name == one.name else one.name)


def _operators(one: Proposal) -> list[str]:
    if one.role in ("dense", "weight"):
        return ['{op = "fill"}']
    if one.role == "label":
        _, made = label_of(one.label, {one.name: str(one.facts.type)})
        return [f'{{op = "one_hot", values = {json.dumps(op.values)}}}' if isinstance(op, OneHot) else
                f'{{op = "compare", to = {json.dumps(op.to)}}}' for op in made if isinstance(op, (OneHot, Compare))]
    if one.hash is None and isinstance(one.facts.high, int) and one.facts.high < _MOST_ROOM:
        return [f'{{op = "modulus", size = {one.facts.high + 1}}}']
    return [f'{{op = "hash", size = {one.hash or 1_000_000}}}']


def _column(name: str, role: str, operators: list[str], seen: str, source: str | None = None) -> list[str]:
    lines = [seen, "[[column]]", f"name = {json.dumps(name, ensure_ascii=False)}"]
    if source is not None:
        lines.append(f"from = {json.dumps(source, ensure_ascii=False)}")
    lines.append(f'role = "{role}"')
    if operators:
        lines.append(f"ops = [{', '.join(operators)}]")
    return [*lines, ""]
