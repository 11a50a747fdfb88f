"""Draws feature specs and rows from a seed: every operator in chains, roles, types, formats, and odd values."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.ops import Operator
from sluice.etl.ops.base import LISTS
from sluice.etl.ops.chain import follow
from sluice.etl.spec.columns import read_operator
from sluice.etl.spec.input_section import THOUSANDS
from tests.etl.tables import section, toml, write_rows
from tests.fuzz.case import KEY, LABEL, TIME_FORMAT, Case, Misfit
from tests.product import ARROW_TYPES, INPUT_TYPES, OPERATORS, Fitted, Spec, SpecError, transformed

MODULE = "tests.fuzz.drawn_specs"
"""The module whose functions the specs may name."""
_WANTED = {
    "dense": "number",
    "weight": "number",
    "sparse": "id",
    "id_list": "ids",
    "time": "number",
    "key": "text",
}
_MOST_OPS, _TRIES = 5, 20

INTS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    23,
    24,
    86_399,
    86_400,
    1_700_000_000,
    1_700_000_001,
    2**24,
    2**24 + 1,
    2**31 - 1,
    2**31,
    -(2**31),
    2**53,
    2**53 + 1,
    -(2**53) - 1,
    2**62 + 1,
    2**63 - 1,
    -(2**63) + 1,
    -(2**63),
)
LONG = (2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**20, -(10**25), 10**40)
"""Whole numbers that JSON may hold where floats are, or among texts."""
FLOATS = (
    0.0,
    -0.0,
    0.5,
    1.0,
    1.5,
    -2.25,
    0.1,
    1 / 3,
    0.999999,
    5e-324,
    1e-300,
    1e-45,
    1.2e-38,
    1e-6,
    16_777_217.0,
    1_700_000_000.25,
    1_700_000_001.25,
    2.0**53,
    1e15,
    1e22,
    3.4028234e38,
    253_402_300_799.0,
    -1e-3,
    -1e12,
)
HUGE = (1e39, -1e39, 1e300, -1e300, 1.7976931348623157e308, -1.7976931348623157e308)
NOT_FINITE = (math.nan, math.inf, -math.inf)
TEXTS = (
    "",
    "a",
    "A",
    "b",
    "é",
    "É",
    "e\u0301",
    "ß",
    "İ",
    "\U0001f600",
    "日本",
    "a|b",
    "a|b|a",
    "|",
    "||",
    "a|",
    "x\x1fy",
    "x\x00y",
    "\x1b0",
    "\x1b",
    "0",
    "007",
    "-0",
    "-1",
    "1.5",
    "1e5",
    "nan",
    "null",
    " a ",
    "a b c",
    '"',
    'a"b',
    "a,b;c",
    "18446744073709551615",
    "9223372036854775808",
    "9223372036854775807",
    "-9223372036854775808",
    "99999999999999999999",
    "2024-02-29 10:00:00",
    "2024-02-31 10:00:00",
    "29.02.2024 23:59",
    "14102100",
    "2024-03-31 02:30:00",
    "Europe/Berlin",
    "UTC",
    "no/zone",
    "x" * 70,
    "\u2028",
    "\ufeffa",
)
_IN_LINES = ("\t", "a\tb", "two\nlines", "\r")
"""Texts that only JSON and Parquet can hold."""
ZONES = ("UTC", "Europe/Berlin", "America/St_Johns", "Asia/Kathmandu")
_FORMATS = ("%Y-%m-%d %H:%M:%S", "%d.%m.%Y %H:%M", "%y%m%d%H", "%Y-%m-%d %H:%M:%S.%f")


def doubled(values: pa.Array) -> pa.Array:
    return pc.multiply(values, 2.0)


def shouted(values: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(values, "!", "")


def tagged(numbers: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(numbers.cast(pa.string()), texts, "~")


def parity(values: pa.Array) -> pa.Array:
    return pa.array(
        [
            None if value is None or not math.isfinite(value) else (value % 2 >= 1) + 2
            for value in values.to_pylist()
        ],
        pa.int32(),
    )


_FUNCTIONS = {
    "doubled": (("number",), "number"),
    "shouted": (("text",), "text"),
    "parity": (("number",), "id"),
    "tagged": (("number", "text"), "text"),
}


_MISFITS = {
    "int": [Misfit(text, json.dumps(text)) for text in ("abc", "--1", "1,5", " ")]
    + [
        Misfit(text, text) for text in ("1.5", "1e3", "9223372036854775808", "-9223372036854775809")
    ],
    "float": [Misfit(text, json.dumps(text)) for text in ("abc", "1.5.2", "0x1p3", "1 5")],
}
JSON_MISFITS = {
    "int": ["[1]", "{}", '"12"', "1.0"],
    "float": ["[1.5]", '"1.5"'],
    "text": ["{}", '["a"]', '"\\ud800"'],
    "texts": ['"a"', "5", '[["a"]]', '{"a": 1}'],
    "floats": ["3", '["a"]', "[[1.5]]"],
}

WRITTEN = (True, False, *INTS[3:], *LONG, *FLOATS)

Parameters = Callable[[random.Random, str], dict[str, Any]]


def _some(draw: random.Random, values: Sequence[Any], most: int = 4) -> list[Any]:
    return draw.sample(values, draw.randint(1, most))


def _number(draw: random.Random) -> float:
    return draw.choice(
        [*FLOATS[:-2], -1.0, 3.0, float(draw.randint(-100, 100)), draw.uniform(-10, 10)]
    )


def _clip(draw: random.Random, _: str) -> dict[str, Any]:
    low, high = sorted((_number(draw), _number(draw)))
    return draw.choice([{"low": low}, {"high": high}, {"low": low, "high": high}])


def _sizes(draw: random.Random, _: str) -> dict[str, Any]:
    sizes = [1, 2, 7, 100, 1000, 1000, 65_536, 4_000_000_007]
    return {"size": draw.choice(sizes), **_maybe(draw, salt=draw.randint(0, 9))}


def _modulus(draw: random.Random, _: str) -> dict[str, Any]:
    return {"size": draw.choice([1, 2, 7, 1000, 2**31 - 3, 4_000_000_007])}


def _maybe(draw: random.Random, **given: Any) -> dict[str, Any]:
    """Each of these parameters, or none, so that its default is used."""
    return {name: value for name, value in given.items() if draw.random() < 0.4}


def _map(draw: random.Random, _: str) -> dict[str, Any]:
    values = _some(draw, TEXTS)
    return {
        "values": values,
        "to": [draw.choice(TEXTS) for _ in values],
        **_maybe(draw, others="null"),
    }


def _categorify(draw: random.Random, _: str) -> dict[str, Any]:
    counts, oov = draw.randint(1, 3), draw.choice([1, 1, 4])
    return {
        "min_count": counts,
        "oov": oov,
        **draw.choice([{}, {"max_size": 3}, {"joint": f"j{counts}{oov}"}]),
    }


def _target(draw: random.Random, _: str) -> dict[str, Any]:
    return _maybe(draw, folds=3, smoothing=draw.choice([0.5, 20.0]))


def _python(draw: random.Random, kind: str) -> dict[str, Any]:
    fitting = [name for name, (inputs, _) in _FUNCTIONS.items() if kind in (inputs[0], "row")]
    name = draw.choice(fitting or list(_FUNCTIONS))
    inputs, output = _FUNCTIONS[name]
    size = 4 if output == "id" else 0
    return {"function": f"{MODULE}:{name}", "inputs": list(inputs), "output": output, "size": size}


PARAMETERS: dict[str, Parameters] = {
    "fill": lambda draw, _: _maybe(draw, value=_number(draw), indicator=True),
    "fill_mean": lambda draw, _: _maybe(draw, indicator=True),
    "fill_median": lambda draw, _: _maybe(draw, indicator=True),
    "missing": lambda draw, _: {},
    "clip": _clip,
    "scale": lambda draw, _: {"by": draw.choice([1000.0, -3.0, 1e-3, 0.1, 1e300])},
    "log": lambda draw, _: _maybe(draw, shift=_number(draw), floor=draw.choice([1e-9, 0.5, 2.0])),
    "compare": lambda draw, _: {
        "to": f"{draw.choice(['==', '!=', '<', '<=', '>', '>='])} {_number(draw)!r}"
    },
    "standardise": lambda draw, _: {},
    "bucketize": lambda draw, _: {"boundaries": sorted(set(_some(draw, FLOATS + HUGE, 6)))},
    "quantiles": lambda draw, _: {"buckets": draw.choice([2, 5, 50])},
    "one_hot": lambda draw, _: {"values": _some(draw, TEXTS, 3)},
    "categorify": _categorify,
    "vocabulary": lambda draw, _: {"values": _some(draw, TEXTS, 6), **_maybe(draw, oov=3)},
    "hash": _sizes,
    "cross": _sizes,
    "modulus": _modulus,
    "map": _map,
    "lower": lambda draw, _: {},
    "replace": lambda draw, _: draw.choice(
        [
            {"pattern": "[aeiou]"},
            {"pattern": "(.)b", "to": "\\1-"},
            {"pattern": "^$", "to": "none"},
            {"pattern": "[^\\pL\\pN]+", "to": " "},
        ]
    ),
    "concat": lambda draw, _: {},
    "split": lambda draw, _: _maybe(draw, separator=draw.choice([" ", "b", "||"])),
    "ngram": lambda draw, _: _maybe(draw, size=3),
    "first_x": lambda draw, _: {"size": draw.randint(1, 3), **_maybe(draw, last=True)},
    "bag": lambda draw, kind: {
        "of": draw.choice(["size"] if kind == "texts" else ["size", "sum", "mean", "min", "max"])
    },
    "count": lambda draw, _: _maybe(draw, share=True),
    "target": _target,
    "parse_time": lambda draw, _: {
        **_maybe(draw, zone=draw.choice(ZONES)),
        "format": draw.choice([*_FORMATS, list(_FORMATS[:2]), list(_FORMATS[::-1])]),
    },
    "hour": lambda draw, _: _maybe(draw, zone=draw.choice(ZONES)),
    "weekday": lambda draw, _: _maybe(draw, zone=draw.choice(ZONES)),
    "python": _python,
}
"""How the parameters of each operator are drawn, where it takes a column of a kind."""
_OF_TRANSFORMS = tuple(
    name for name in PARAMETERS if not issubclass(OPERATORS[name], Fitted) and name != "python"
)


def drawn(seed: int, folder: Path, *, amounts: bool = False, rules: bool = False) -> Case:
    """The case of that seed; the spec names files of that folder. With `amounts`, some numbers are written as people
    write them. With `rules`, there are joins as of a time, lags and histories."""
    draw = random.Random(seed)
    form = draw.choice(["csv", "tsv", "json", "parquet"])
    inputs = {KEY: "int", LABEL: "int", "at": "int"} | _drawn_inputs(draw, form)
    case = Case(seed=seed, form=form, inputs=inputs, rows={}, folder=folder)
    if form in ("csv", "tsv"):
        case.delimiter, case.decimal = (
            draw.choice([(",", "."), (";", "."), (";", ",")])
            if form == "csv"
            else draw.choice([("\t", "."), ("|", "."), ("\t", ",")])
        )
        case.header = draw.random() < 0.5
    if amounts:
        _draw_amounts(random.Random(seed), case)
    if draw.random() < 0.3:
        case.time = "at"
    _draw_rows(draw, case)
    case.head = _head(draw, case)
    case.entries = _drawn_entries(draw, case)
    _leave(draw, case)
    case.transforms = _drawn_transforms(draw, case)
    if rules:
        _draw_rules(random.Random(seed), case)
    return case


def _draw_amounts(draw: random.Random, case: Case) -> None:
    """Draws how numbers are written. It has its own generator, so that the rest of a case stays the same."""
    if case.form == "parquet":
        return
    case.number_texts = case.form != "json" or draw.random() < 0.7
    if not case.number_texts:
        return
    if case.form == "json":
        case.decimal = draw.choice(".,")
    others = {case.decimal, *([case.delimiter] if case.form == "tsv" else [])}
    marks = [mark for mark in THOUSANDS if mark not in others]
    case.thousands = draw.choice(["", *marks])
    case.null_values = draw.choice([[], ["N/A"], ["-", "null", "(none)"]])


def _drawn_inputs(draw: random.Random, form: str) -> dict[str, str]:
    counts = {
        "I": ("int", draw.randint(1, 3)),
        "F": ("float", draw.randint(1, 3)),
        "T": ("text", draw.randint(1, 3)),
    }
    if form in ("json", "parquet"):
        counts |= {"L": ("texts", 2), "V": ("floats", 2)}
    return {
        f"{letter}{n}": kind
        for letter, (kind, count) in counts.items()
        for n in range(1, count + 1)
    }


def _draw_rows(draw: random.Random, case: Case) -> None:
    count = draw.choice([20, 60, 150])
    wrong = draw.choice([0.0, 0.0, 0.02])
    for name, kind in case.inputs.items():
        pool = _pool(draw, case, name, kind)
        empty = draw.choice([0.0, 0.1, 0.5])
        case.rows[name] = [
            None if draw.random() < empty else draw.choice(pool) for _ in range(count)
        ]
        if kind in _MISFITS or case.form == "json":
            for row in range(count):
                if draw.random() < wrong and name != KEY:
                    case.rows[name][row] = _misfit(draw, case, name, kind)
    case.rows[KEY] = list(range(1, count + 1))
    case.rows[LABEL] = [draw.choice([0, 1]) for _ in range(count)]


def _misfit(draw: random.Random, case: Case, name: str, kind: str) -> Any:
    if name == case.time or (case.form == "parquet" and kind != "int"):
        return None
    if case.form == "parquet":  # the column's whole numbers have to be floats without rounding, too
        case.rows[name] = [
            cell % 1000 if isinstance(cell, int) else cell for cell in case.rows[name]
        ]
        return Misfit("1.5", "1.5")
    if case.form == "json" and (kind not in _MISFITS or draw.random() < 0.5):
        text = draw.choice(JSON_MISFITS[kind])
        if case.number_texts and text in ('"12"', '"1.5"'):
            text = "{}"
        return Misfit(text, text)
    return draw.choice(
        [
            misfit
            for misfit in _MISFITS[kind]
            if case.delimiter not in misfit.text
            and not (case.decimal == "," and "," in misfit.text)
        ]
    )


def _pool(draw: random.Random, case: Case, name: str, kind: str) -> list[Any]:
    """The values that a column has in this case."""
    if name == "at":
        return [
            draw.randint(0, 3600) + draw.choice([1_700_000_000, 0, 1_711_846_800])
            for _ in range(20)
        ]
    if kind in ("texts", "floats"):
        single = _pool(draw, case, "", "text" if kind == "texts" else "float")
        return [
            [draw.choice([None, *single, *single]) for _ in range(draw.randint(0, 4))]
            for _ in range(12)
        ]
    if kind == "int":
        return [*_some(draw, INTS, 12), *(draw.randint(-100, 100) for _ in range(6))]
    if kind == "float":
        more = [*draw.choice([(), HUGE]), *draw.choice([(), NOT_FINITE])]
        if case.form == "json":
            more += draw.choice([(), LONG])
        return [*_some(draw, FLOATS, 12), *more, *(draw.uniform(-1e3, 1e3) for _ in range(6))]
    texts = [*TEXTS, *(_IN_LINES if case.form in ("json", "parquet") else ())]
    if case.form == "tsv":  # which has no quotes, and cannot tell an empty text from none
        texts = [text for text in texts if text and case.delimiter not in text and "\n" not in text]
    # In JSON, a number or a boolean is the text that it is written as. `literal` may write 1 as true.
    written = draw.choice([(), WRITTEN]) if case.form == "json" else ()
    return [
        *texts[:1],
        *_some(draw, texts, 14),
        *_some(draw, texts, 14),
        *written,
    ]  # the empty text, if it can be told from none


def _head(draw: random.Random, case: Case) -> str:
    columns: list[Any] = [
        {"name": f"{name}:{kind}", "format": TIME_FORMAT} if name == case.time else f"{name}:{kind}"
        for name, kind in case.inputs.items()
    ]
    given: dict[str, Any] = {"format": case.form, "columns": columns}
    if case.form in ("csv", "tsv"):
        given |= {"delimiter": case.delimiter, "header": case.header, "decimal": case.decimal}
    if case.number_texts:
        given |= {"decimal": case.decimal, "thousands": case.thousands}
        given |= {"null_values": case.null_values}
    bounds = {"split_time": "at", "split": {"train": 0, "test": 1_700_001_800}}
    shares = {"split": {"train": 0.6, "test": 0.4}}
    split = draw.choice([shares, shares, {"split": {"all": 1}}, bounds])
    if split is bounds:
        case.rows["at"] = [
            1_700_000_000 if not isinstance(cell, int) else cell for cell in case.rows["at"]
        ]
    table = {
        "seed": draw.randint(0, 9),
        "row_group_rows": draw.choice([8, 64, 1000]),
        "file_rows": draw.choice([30, 1000]),
        "plain_lists": draw.random() < 0.3,
        **split,
    }
    return "\n".join(
        [
            "[input]",
            *(f"{key} = {toml(value)}" for key, value in given.items()),
            "[table]",
            *(f"{key} = {toml(value)}" for key, value in table.items()),
            "",
        ]
    )


_FIRST = [{"name": LABEL, "role": "label"}, {"name": KEY, "role": "dense", "ops": [{"op": "fill"}]}]


def parsed(case: Case, entries: list[dict[str, Any]]) -> Spec | None:
    """The spec with these columns; None if it would be refused."""
    try:
        return Spec.parse(case.text(entries))
    except SpecError:
        return None


def _drawn_entries(draw: random.Random, case: Case) -> list[dict[str, Any]]:
    entries = [dict(entry) for entry in _FIRST]
    tries = 0
    for role in [
        "sparse",
        *draw.choices(list(_WANTED), [10, 1, 8, 6, 1, 1], k=draw.randint(5, 15)),
    ]:
        for _ in range(_TRIES):
            tries += 1
            entry = _entry(draw, case, f"c{tries}", role)
            if entry is not None and (parsed(case, [*entries, entry])) is not None:
                entries.append(entry)
                break
    return entries


def _entry(draw: random.Random, case: Case, name: str, role: str) -> dict[str, Any] | None:
    kinds = {
        column: INPUT_TYPES[kind]
        for column, kind in case.inputs.items()
        if column not in (KEY, LABEL)
    }
    if draw.random() < 0.15:
        letter = draw.choice("IFT")
        chain = _chain(draw, INPUT_TYPES[case.inputs[f"{letter}1"]], role)
        return {"match": f"{letter}*", "role": role, "ops": chain} if chain else None
    if draw.random() < 0.25:
        op, sources = _of_several(draw, kinds)
        first = {"op": op, **PARAMETERS[op](draw, "row")}
        if op == "python":
            first |= {
                "function": f"{MODULE}:tagged",
                "inputs": ["number", "text"],
                "output": "text",
                "size": 0,
            }
        given = follow(read_operator(first, "")[0], "row")
        rest = given and _chain(draw, given, role)
        return (
            None
            if rest is None
            else {"name": name, "from": sources, "role": role, "ops": [first, *rest]}
        )
    source = draw.choice(list(kinds))
    chain = _chain(draw, kinds[source], role)
    return None if chain is None else {"name": name, "from": [source], "role": role, "ops": chain}


def _of_several(draw: random.Random, kinds: Mapping[str, str]) -> tuple[str, list[str]]:
    """An operator on several columns, with columns for it."""
    by_kind = {
        kind: [name for name, own in kinds.items() if own == kind]
        for kind in ("number", "text", "numbers", "texts")
    }
    scalars = [*by_kind["number"], *by_kind["text"]]
    return draw.choice(
        [
            ("cross", draw.sample(scalars, 2)),
            ("concat", draw.sample(scalars, 3)),
            ("hour", [draw.choice(by_kind["number"]), draw.choice(by_kind["text"])]),
            ("python", [draw.choice(by_kind["number"]), draw.choice(by_kind["text"])]),
        ]
    )


def _chain(
    draw: random.Random, kind: str, role: str, names: Sequence[str] = tuple(PARAMETERS)
) -> list[dict[str, Any]] | None:
    """Operators that lead from a kind to what a role needs; None if they went astray."""
    chain: list[dict[str, Any]] = []
    made: list[Operator] = []
    while len(chain) < _MOST_OPS:
        if kind == _WANTED[role] and (
            draw.random() < 0.4 or (kind in ("id", "ids") and draw.random() < 0.7)
        ):
            break
        step = _step(draw, kind, names)
        if step is None:
            return None
        chain.append(step[0])
        made.append(step[1])
        kind = step[2]
    if kind != _WANTED[role] or (sum(isinstance(op, Fitted) for op in made) > 3):
        return None
    if role in ("dense", "weight") and (
        draw.random() < 0.8 or not any(made_step["op"].startswith("fill") for made_step in chain)
    ):
        chain.append({"op": "fill", **_maybe(draw, value=_number(draw))})
    if role == "weight":
        chain.append({"op": "clip", "low": 0.5, "high": 9.0})
    return chain


def _step(
    draw: random.Random, kind: str, names: Sequence[str]
) -> tuple[dict[str, Any], Operator, str] | None:
    """An operator that takes a column of that kind, with the kind that it gives."""
    for _ in range(20):
        name = draw.choice(names)
        given = PARAMETERS[name](draw, kind)
        op = read_operator({"op": name, **given}, "")[0]
        after = follow(op, kind)
        if after is not None and (name != "python" or op.inputs == (kind,)):
            return {"op": name, **given}, op, after
    return None


def _leave(draw: random.Random, case: Case) -> None:
    """Leaves operators of some columns to the loader, by `online`."""
    case.left = [_left(draw, case, entry) for entry in case.entries]


def _left(draw: random.Random, case: Case, entry: dict[str, Any]) -> dict[str, Any]:
    places = list(range(len(entry.get("ops", ()))))
    draw.shuffle(places)
    if entry.get("name") == KEY or draw.random() < 0.2:
        return dict(entry)
    for place in places:
        ops = [{**op, "online": True} if n >= place else op for n, op in enumerate(entry["ops"])]
        if parsed(case, [*_FIRST, {**entry, "ops": ops}]) is not None:
            return {**entry, "ops": ops}
    return dict(entry)


def _draw_rules(draw: random.Random, case: Case) -> None:
    """Adds a join with and one without a time, lags and histories, with a column of each."""
    case.has_rules = True
    scalars = [name for name, kind in case.inputs.items() if kind in ("int", "float", "text")]
    keys = [name for name in scalars if name not in (KEY, LABEL)]
    made: dict[str, str] = {}
    for number in range(2):
        kinds = {f"side{number}{kind}": kind for kind in ("int", "float", "text")}
        when = {"time": "at", "their_time": "since"} if number == 0 else {}
        by = draw.choice(keys)
        path = _write_side(draw, case, by, kinds, case.folder / f"side{number}.parquet")
        columns = [f"{name}:{kind}" for name, kind in kinds.items()]
        join = section(
            "join", path=str(path), on=[by], their_on=["theirs"], columns=columns, **when
        )
        case.head += join
        made |= {name: INPUT_TYPES[kind] for name, kind in kinds.items()}
    for number in range(4):
        of, by = draw.choice(scalars), draw.choice([*keys, "side0int"])
        kind = INPUT_TYPES[case.inputs[of]]
        rule: dict[str, Any] = {"name": f"past{number}", "of": of, "by": by, "order": "at"}
        if number % 2:
            is_difference = of != LABEL and kind == "number" and draw.random() < 0.5
            case.head += section("lag", **rule, rows=draw.randint(1, 2), difference=is_difference)
        else:
            is_positive = draw.random() < 0.3
            case.head += section("history", **rule, length=draw.randint(1, 3), positive=is_positive)
        made[f"past{number}"] = kind if number % 2 else LISTS[kind]
    for name, kind in made.items():
        for _ in range(_TRIES):
            role = draw.choice(["dense", "sparse", "id_list"])
            if ops := _chain(draw, kind, role):
                entry = {"name": f"c{name}", "from": [name], "role": role, "ops": ops}
                if parsed(case, [*case.entries, entry]) is not None:
                    case.entries.append(entry)
                    case.left.append(_left(draw, case, entry))
                    break


def _write_side(
    draw: random.Random, case: Case, by: str, kinds: Mapping[str, str], path: Path
) -> Path:
    """Writes a side table: few keys with several rows each, at times of the case's rows and between them."""
    given = [
        value for value in case.rows[by] if value is not None and not isinstance(value, Misfit)
    ]
    times = [time for time in case.rows["at"] if isinstance(time, int)] or [0]
    keys = [*draw.sample(given, min(6, len(given))), None]
    pools: dict[str, Sequence[Any]] = {"int": INTS, "float": FLOATS, "text": TEXTS}
    count = draw.choice([0, 20, 60])
    columns = {
        name: pa.array([draw.choice([None, *pools[kind]]) for _ in range(count)], ARROW_TYPES[kind])
        for name, kind in kinds.items()
    }
    since = [
        draw.choice([draw.choice(times) + draw.choice([0, 0, 0, 1, -1, 0.5]), None, math.nan, -1e9])
        for _ in range(count)
    ]
    theirs = draw.choices(keys, k=count)
    if case.inputs[by] == "float":
        theirs = [key if key is None else float(key) for key in theirs]
    elif case.inputs[by] == "text":  # a number or boolean of JSON is the text that it is written as
        theirs = [key if key is None or isinstance(key, str) else json.dumps(key) for key in theirs]
    columns |= {"theirs": pa.array(theirs, ARROW_TYPES[case.inputs[by]])}
    return write_rows(path, pa.table({**columns, "since": pa.array(since, pa.float64())}))


def _drawn_transforms(draw: random.Random, case: Case) -> list[dict[str, Any]]:
    spec = Spec.parse(case.loader())
    kinds = {"dense": "number", "sparse": "id", "id_list": "ids"}
    columns = [column for column in spec.columns if column.role in kinds and column.name != KEY]
    drawn: list[dict[str, Any]] = []
    for number in range(draw.choice([0, 4, 8])):
        source = draw.choice(columns)
        role = draw.choice(["dense", "sparse", "id_list"])
        chain = _chain(draw, kinds[source.role], role, _OF_TRANSFORMS)
        if not chain:
            continue
        if role == "dense":  # what a transform gives beyond float32 is an error
            chain += [{"op": "fill"}, {"op": "clip", "low": -1e30, "high": 1e30}]
        transform = {
            "name": f"t{number}",
            "inputs": [source.name],
            "outputs": [{"name": f"made{number}"}],
            "ops": chain,
        }
        case.transforms = [*drawn, transform]
        try:
            text = case.loader()
            whole = Spec.parse(text)
            transformed(
                whole.fields(dict.fromkeys((c.name for c in whole.columns), 1000)), whole.transforms
            )
        except SpecError:
            continue
        drawn.append(transform)
    return drawn
