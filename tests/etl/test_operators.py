"""Operators that learn or meet several columns, lists or times, against slow twins in plain Python."""

import datetime
import decimal
import itertools
import math
import operator
import re
import statistics
import zoneinfo
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.etl.ops import OperatorError, online
from sluice.etl.ops.chain import make_labels
from sluice.etl.ops.ids import _BUCKET_SALT, Cross, Modulus, Vocabulary
from sluice.etl.ops.lists import Bag, FirstX, packed
from sluice.etl.ops.numeric import COMPARISONS, Bucketize, Clip, Compare, Missing, OneHot, Scale
from sluice.etl.ops.scaling import FillMean, FillMedian, Quantiles, Standardise
from sluice.etl.ops.statistics import Count, Target
from sluice.etl.ops.text import Concat, Lower, Map, Ngram, Replace, Split
from sluice.etl.ops.timestamps import Hour, ParseTime, Weekday
from tests.etl.slow_hashes import hashed
from tests.etl.tables import struct_of
from tests.product import OPERATORS, Categorify, Field, Fill, Hash, Log, Python, hash_rows, step
from tests.raises import raises

pytestmark = pytest.mark.slow

ANY = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 5).map(float)
NUMBERS = st.lists(ANY)
TEXTS = st.lists(
    st.none() | st.text(max_size=8) | st.sampled_from(["", "a", "b", "é", "日本", "1e5", "\0"])
)
TEXT, WORDS = pa.string(), pa.list_(pa.string())
LISTS = st.lists(
    st.none() | st.lists(st.none() | st.sampled_from(["a", "b", "c", "日", ""]), max_size=6)
)
ODD = st.none() | st.sampled_from(
    [math.nan, math.inf, -math.inf, -0.0, 5e-324, -1.7e308, 2.0**63, -(2.0**63)]
)


def is_number(v):
    return v is not None and math.isfinite(v)


def learned(op, *columns):
    """What it learns from batches in any order, as Spark adds them up."""
    sums = summed(op.count, columns)
    while (coarse := op.undecided(as_table(sums))) is not None:
        for name in coarse["value"].to_pylist():
            del sums[name]
        sums.update(summed(lambda column, ranges=coarse: op.count_within(column, ranges), columns))
    return op.learn(as_table(sums))


def summed(count, columns):
    sums: Counter = Counter()
    for column in columns:
        names, counts = count(column)
        assert len(names) == len(counts)
        for name, amount in zip(names.to_pylist(), counts.to_pylist(), strict=True):
            sums[name] += amount
    return sums


def as_table(sums):
    order = sorted(sums, key=lambda name: (-sums[name], name.encode()))
    return pa.table(
        {
            "value": pa.array(order, TEXT),
            "count": pa.array([sums[n] for n in order], pa.int64()),
            "place": pa.array(range(1, len(order) + 1), pa.int64()),
        }
    )


def fitted(op, values, kind=None):
    """Learned from two halves and applied to the whole."""
    kind = kind or pa.float64()
    half = len(values) // 2
    state = learned(op, pa.array(values[half:], kind), pa.array(values[:half], kind))
    return op.apply(pa.array(values, kind), op.prepare(state)).to_pylist(), state


def applied(op, values, kind=None, state=None):
    """What the operator makes of a column, or of values, which are numbers if no kind is given."""
    column = values if isinstance(values, pa.Array) else pa.array(values, kind or pa.float64())
    return op.apply(column, state).to_pylist()


FINITE = st.floats(allow_nan=False, allow_infinity=False)


def moments(values):
    """Mean and standard deviation, each rounded once."""
    mean = sum(map(Fraction, values)) / len(values)
    variance = sum((Fraction(value) - mean) ** 2 for value in values) / len(values)
    with decimal.localcontext(prec=60, Emax=9999, Emin=-9999):
        return float(mean), float(
            (Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt()
        )


@given(st.lists(FINITE | st.floats(1e9, 1e9 + 1) | st.floats(-1e-12, 1e-12), min_size=1))
def test_what_is_learned_of_numbers_is_exact_however_large_small_or_close_they_are(values):
    """Nothing is cut to a range, or lost beside something larger: 1e300 counts as 1e300, 1e-12 as 1e-12."""
    mean, spread = moments(values)
    _, state = fitted(FillMean(), values)
    assert state["mean"].to_pylist() == [mean]
    _, state = fitted(Standardise(), values)
    assert state["mean"].to_pylist() == [mean]
    assert state["spread"][0].as_py() == pytest.approx(spread, rel=1e-15, abs=5e-324)


CLOSE = (
    st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)
    | st.integers(-2047, 2047).map(float)
    | st.integers(1_700_000_000, 1_700_000_900).map(float)
    | st.floats(-1e9 - 1e-3, -1e9)
    | st.sampled_from([1e300, -1e-300, 2.0**63, 0.1, 0.1 + 2**-56])
)


@given(st.lists(st.sampled_from([None, math.nan, math.inf, -math.inf]) | CLOSE))
def test_a_median_is_exact_however_close_the_numbers_are(values):
    """Among few rows, each range that decides is divided."""
    got, _ = fitted(FillMedian(), values)
    median = statistics.median_low([v for v in values if is_number(v)] or [0.0])
    assert got == [v if is_number(v) else median for v in values]


@given(
    st.lists(
        st.sampled_from([None, math.nan, math.inf, -math.inf])
        | st.integers(-300, 300).map(float)
        | CLOSE
    ),
    st.integers(2, 9),
)
def test_quantiles_cut_where_the_shares_lie_however_close_the_numbers_are(values, buckets):
    got, state = fitted(Quantiles(buckets=buckets), values)
    good = sorted(filter(is_number, values))
    ends = (
        {good[max(0, math.ceil(len(good) * i / buckets) - 1)] for i in range(1, buckets)}
        if good
        else {0.0}
    )
    assert state[0].to_pylist() == sorted(ends)
    assert got == [
        1 if v is None or math.isnan(v) else 2 + sum(end <= v for end in ends) for v in values
    ]
    assert all(i < Quantiles(buckets=buckets).cardinality(state) for i in got)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    base=st.sampled_from([0.0, 1e6, 1_700_000_000.0, -1_700_000_000.0, 1.7e12, 1e15]),
    span=st.sampled_from([600, 86_400, 31_536_000]),
    buckets=st.sampled_from([2, 10, 100, 1000]),
)
def test_each_range_has_its_share_of_the_rows_however_far_the_numbers_are_from_0(
    seed, base, span, buckets
):
    """Also beside missing times that are written as 0. A bucket has one row in 1,024 too many, or a 16th of its own,
    and those that are equal."""
    rng = np.random.default_rng(seed)
    values = base + rng.integers(0, span, 20_000).astype(float)
    values[rng.random(len(values)) < 0.01] = 0.0
    state = learned(Quantiles(buckets=buckets), pa.array(values[:9000]), pa.array(values[9000:]))
    equal = np.unique(values, return_counts=True)[1]
    slack = 2 * len(values) / max(1024, 16 * buckets) + 2 * equal.max() + 1
    counts = np.diff(np.searchsorted(np.sort(values), state[0].to_numpy()))
    assert counts.max(initial=0) <= len(values) / buckets + slack


def test_numbers_that_lie_far_apart_keep_the_state_that_0_3_0_learned():
    """A range of 11 bits has few of them, so it is not divided."""
    values = np.random.default_rng(3).uniform(0, 1.5, 50_000)
    state = learned(Quantiles(buckets=2), pa.array(values))
    exact = np.quantile(values, 0.5, method="inverted_cdf")
    assert state.to_pydict() == {"boundary": [np.floor(exact * 2048) / 2048]}


SIGNS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@given(
    st.lists(ODD | st.floats(-1e6, 1e6) | st.integers(-5, 5).map(float)),
    st.floats(-10, 10),
    st.floats(0, 10),
    st.sampled_from(sorted(COMPARISONS)),
)
def test_each_number_becomes_what_plain_python_makes_of_it(values, low, more, sign):
    """Null and NaN stay what they are, unless an operator is there to replace them."""

    def unknown(v):
        return v is None or math.isnan(v)

    for op, slow in (
        (Clip(low=low, high=low + more), lambda v: min(max(v, low), low + more)),
        (Log(shift=low), lambda v: math.log(max(v + low, 1e-6))),
    ):
        for got, v in zip(applied(op, values), values, strict=True):
            if unknown(v):
                assert got is None if v is None else math.isnan(got)
            else:
                assert got == pytest.approx(slow(v), rel=1e-9, abs=1e-9)
    for op, slow in (
        (Fill(value=low), lambda v: v if is_number(v) else low),
        (Missing(), lambda v: float(not is_number(v))),
        (
            Bucketize(boundaries=(-1.0, 0.0, 2.5)),
            lambda v: 1 if unknown(v) else 2 + (v >= -1) + (v >= 0) + (v >= 2.5),
        ),
        (Compare(to=f"{sign} -1.5"), lambda v: None if unknown(v) else SIGNS[sign](v, -1.5)),
    ):
        assert applied(op, values) == [slow(v) for v in values]


@pytest.mark.parametrize(
    ("kind", "values", "facts"),
    [
        *(
            (Compare, {"to": wrong}, (f"to = {wrong!r}", ">= 4"))
            for wrong in (
                "4",
                "",
                *(f"{s}{rest}" for s in SIGNS for rest in (" four", f"{s} 4", " 4 5")),
            )
        ),
        (Scale, {"by": 0}, ("by = 0",)),
        (Replace, {"pattern": "a", "to": r"\1"}, ("pattern = ",)),
        (ParseTime, {"format": "%z %Y"}, ("%f", "%S")),
        (ParseTime, {"format": ("%Y", "%Y")}, ("several different",)),
        (ParseTime, {"format": "%H:%f"}, ("%f", "%S")),
        (Python, {"inputs": ("numeral",), "output": "number"}, ("inputs = ", "'numeral'")),
        (Python, {"inputs": ("number",), "output": "id"}, ("size:", "ids")),
    ],
)
def test_an_operator_that_cannot_be_is_refused(kind, values, facts):
    if kind is Python:
        values = {"function": f"{__name__}:double", **values}
    with raises(OperatorError, *facts):
        kind(**values)


@pytest.mark.parametrize(
    ("names", "promise"),
    [
        ("fill fill_mean fill_median missing one_hot target", lambda kind: not kind.may_be_null),
        ("fill missing", lambda kind: kind.replaces_missing),
        ("hour parse_time weekday", lambda kind: kind.reads),
        ("hash", lambda kind: kind.takes_stored),
    ],
)
def test_operators_keep_their_promises_on_missing_values(names, promise):
    """What a dense column may end in, what fills a label, what unreadable values count for."""
    assert {name for name, kind in OPERATORS.items() if promise(kind)} == {*names.split()}


def test_an_operator_that_replaces_what_is_missing_does_so_in_a_label_too():
    values = pa.array([None, math.nan, 1.0, 5.0])
    assert make_labels([Fill(value=0)], values).to_pylist() == [0.0, 0.0, 1.0, 5.0]
    assert make_labels([Missing()], values).to_pylist() == [1.0, 1.0, 0.0, 0.0]
    assert make_labels([Compare(to=">= 4")], values).to_pylist() == [None, None, 0.0, 1.0]


@given(TEXTS)
def test_one_hot_map_and_vocabulary(texts):
    for op, want in (
        (OneHot(values=("a",)), {t: float(t == "a") for t in texts}),
        (Map(values=("a", "b"), to=("b", "")), {t: {"a": "b", "b": None}.get(t, t) for t in texts}),
        (
            Map(values=("a", "b"), to=("x", "y"), others="null"),
            {t: {"a": "x", "b": "y"}.get(t) for t in texts},
        ),
    ):
        assert applied(op, texts, TEXT) == [want[t] for t in texts]
    op = Vocabulary(values=("日本", "a", ""), oov=3)
    for got, t in zip(applied(op, texts, TEXT), texts, strict=True):
        known = {None: 1} | {value: 5 + n for n, value in enumerate(op.values)}
        assert got == known.get(t, got)
        assert t in known or 2 <= got < 5


WHOLE = st.integers(-(2**63), 2**64 - 1).map(str) | st.sampled_from(
    ["", "-", "007", "+1", "1.0", "99999999999999999999", "-9223372036854775809", "1e5", "٣"]
)


@given(st.lists(st.none() | WHOLE), st.integers(1, 2**32 - 3))
def test_modulus_is_exact_for_64_bits_signed_and_unsigned(texts, size):
    def slow(text):
        try:
            number = int(text) if text and text.isascii() and text.lstrip("-").isdigit() else None
        except ValueError:
            number = None
        return 1 if number is None or not -(2**63) <= number < 2**64 else 2 + number % size

    assert applied(Modulus(size=size), texts, TEXT) == [slow(t) for t in texts]


@given(
    st.lists(
        st.tuples(
            st.none() | st.text(max_size=3) | st.text("\0\x1b\x1f012", max_size=3),
            st.none() | st.integers(-9, 9) | st.sampled_from([2**63 - 1, -(2**63)]),
        )
    )
)
@example([(None, None), ("\0", None)])
def test_cross_and_concat_tell_combinations_apart(rows):
    columns = [
        pa.array([r[0] for r in rows], TEXT),
        pa.array([r[1] for r in rows], pa.int64()),
    ]
    column = pa.StructArray.from_arrays(columns, ["a", "b"])
    ids = applied(Cross(size=1000, salt=3), column)
    assert ids == [2 + int(k) % 1000 for k in hash_rows(columns, 3)]
    texts = applied(Concat(), column)
    assert len(set(texts)) == len(set(rows))


@given(LISTS, st.integers(1, 4), st.booleans())
def test_first_x_ngram_and_bag(lists, size, last):
    column = pa.array([["x"], *lists], WORDS).slice(1)  # a slice begins anywhere
    full = [x or [] for x in lists]
    got = applied(FirstX(size=size, last=last), column)
    assert got == [x[-size:] if last else x[:size] for x in full]
    grams = applied(Ngram(size=2), column)
    named = [
        ["\0" if word is None else word for word in x] for x in full
    ]  # what is missing is an element as well
    assert grams == [[f"{a}\x1f{b}" for a, b in itertools.pairwise(x)] for x in named]
    assert applied(Bag(), column) == [len(x) for x in full]


@given(
    st.lists(
        st.none()
        | st.lists(
            ODD.filter(lambda v: v is None or abs(v) != 1.7e308) | st.integers(-9, 9).map(float),
            max_size=5,
        )
    )
)
def test_bag_statistics(lists):
    column = pa.array(lists, pa.list_(pa.float64()))
    for statistic, slow in (
        ("sum", sum),
        ("mean", lambda x: sum(x) / len(x)),
        ("min", min),
        ("max", max),
    ):
        got = step(Bag(of=statistic), column, None, {}).to_pylist()
        for have, row in zip(got, lists, strict=True):
            there = [v for v in row or [] if v is not None]
            want = (
                (math.nan if any(map(math.isnan, there)) else slow(there))
                if there
                else (0.0 if statistic == "sum" else None)
            )
            assert (
                have == want
                or (math.isnan(have) and math.isnan(want))
                or math.isclose(have, want, abs_tol=4096)
            )


@given(st.lists(st.none() | st.text("aé日|\0", max_size=8)))
def test_split_then_hash_gives_bags(texts):
    split = Split().apply(pa.array(texts, TEXT), None)
    assert split.to_pylist() == [t.split("|") if t else [] for t in texts]
    op = Hash(size=50)
    bags = step(op, split, None, {})
    assert bags.to_pylist() == [applied(op, pa.array(x, TEXT)) for x in split.to_pylist()]
    stored = packed(bags).to_pylist()
    assert [np.frombuffer(b, "<i4").tolist() for b in stored] == bags.to_pylist()


ZONES = ("UTC", "Europe/Berlin", "America/St_Johns", "Asia/Kolkata")


@given(
    st.lists(
        st.none()
        | st.integers(-2_000_000_000, 2_100_000_000)
        | st.integers(-9, 9).map(lambda quarters: quarters / 4)  # a part of a second before 1970
    ),
    st.sampled_from(ZONES),
)
@example([-0.5], "UTC")
def test_hours_and_weekdays_are_those_of_the_zone(seconds, zone):
    column = pa.array(seconds, pa.float64())
    local = [
        None if s is None else datetime.datetime.fromtimestamp(s, zoneinfo.ZoneInfo(zone))
        for s in seconds
    ]
    assert applied(Hour(zone=zone), column) == [t and float(t.hour) for t in local]
    assert applied(Weekday(zone=zone), column) == [t and float(t.weekday()) for t in local]
    both = struct_of(at=column, zone=pa.array([zone] * len(seconds), TEXT))
    assert applied(Hour(), both) == [t and float(t.hour) for t in local]


def test_a_time_that_no_clock_shows_is_missing():
    column = pa.array([math.nan, math.inf, -math.inf, 1e300, -(2.0**63), 2.0**63, None, 0.5])
    assert applied(Hour(), column) == [None] * 7 + [0.0]
    both = struct_of(at=column, zone=pa.array(["Asia/Tokyo"] * 7 + ["no zone"]))
    assert applied(Weekday(), both) == [None] * 8


FROM, UNTIL = datetime.datetime(1900, 1, 1), datetime.datetime(9999, 12, 31)


@pytest.mark.parametrize(
    ("form", "good", "seconds", "bad"),
    [
        (
            "%Y-%m-%d",
            "2024-02-29",
            1709164800,
            "2023-02-29|2024-04-31|24-01-05|2024-01-05x|0024-01-05",
        ),
        ("%y%m%d%H", "14102100", 1413849600, "1410210|14023100|141021000||nonsense"),
        ("%d/%b/%Y", "1/mar/2024", 1709251200, "30/Feb/2024|1/3/2024"),
        ("%H:%M", "10:00", -2208952800, "24:00"),
        ("%F", "2024-02-29", 1709164800, "2024-02-30"),
        ("%D %T", "02/29/24 10:00:00", 1709200800, "02/30/24 10:00:00"),
        ("%FT%T%z", "2024-02-29T10:00:00+14:00", 1709150400, "2024-02-29T10:00:00+15:00"),
        ("%Y-%j", "2024-366", 1735603200, "2023-366"),
        ("%Y-%m-%d %I:%M %p", "2024-03-02 12:30 PM", 1709382600, "2024-02-31 12:30 PM"),
        ("%a, %d %b %Y", "Fri, 01 March 2024", 1709251200, "Sat, 30 Feb 2024"),
        ("%d/%b/%Y:%H:%M:%S %z", "10/Oct/2000:13:55:36 -0700", 971211336, "10/Oct/2000:13:55:36"),
        (
            "%Y-%m-%dT%H:%M:%S,%f%z",
            "2024-01-31T00:00:00,5Z",
            1706659200.5,
            "2024-02-31T00:00:00,5Z|2024-01-31T00:00:00.5Z",
        ),
        (("%Y-%m-%d", "%d.%m.%Y"), "2024-01-05", 1704412800, "5/1/2024"),
        (("%Y-%m-%d", "%d.%m.%Y"), "05.01.2024", 1704412800, "2024.01.05"),
    ],
)
def test_a_time_is_read_as_its_format_says_or_is_none(form, good, seconds, bad):
    read = applied(ParseTime(format=form), [good, None, *bad.split("|")], TEXT)
    assert read == [seconds, *[None] * (len(read) - 1)]


def test_a_time_of_a_zone_is_that_of_its_clocks():
    berlin = ParseTime(format="%Y-%m-%d %H:%M:%S", zone="Europe/Berlin")
    # The second of them comes twice.
    seconds = applied(berlin, ["2026-07-01 00:00:00", "2026-10-25 02:30:00"], TEXT)
    assert seconds == [1782856800.0, 1792888200.0]
    both = struct_of(at=pa.array([0.0] * 3), zone=pa.array(["Asia/Tokyo", "Asia/Tokio", None]))
    assert applied(Hour(), both) == [9.0, None, 0.0]  # this zone was taken for UTC


@pytest.mark.parametrize(
    ("zone", "clock", "change"),
    [
        ("Europe/Berlin", "2026-03-29 02:00:00", "2026-03-29T01:00:00+00:00"),
        ("Europe/Berlin", "2026-03-29 02:59:59", "2026-03-29T01:00:00+00:00"),
        ("America/St_Johns", "2026-03-08 02:30:00", "2026-03-08T05:30:00+00:00"),
        ("Australia/Lord_Howe", "2026-10-04 02:29:59", "2026-10-03T15:30:00+00:00"),
    ],
)
def test_a_time_that_the_clocks_skip_is_the_last_second_before(zone, clock, change):
    seconds = applied(ParseTime(zone=zone), [clock], TEXT)
    assert seconds == [datetime.datetime.fromisoformat(change).timestamp() - 1]


@given(TEXTS, TEXTS)
def test_count_and_share(seen, new):
    for share in (False, True):
        op = Count(share=share)
        state = op.prepare(learned(op, pa.array(seen, TEXT)))
        counts = Counter(t for t in seen if t is not None)
        whole = sum(counts.values()) if share else 1
        got = applied(op, pa.array(new, TEXT), state=state)
        assert got == [None if t is None else pytest.approx(counts[t] / max(1, whole)) for t in new]


def clicks(rows):
    return pa.array(rows, pa.struct({"value": TEXT, "label": pa.int8(), "key": pa.int64()}))


CLICKS = st.lists(
    st.tuples(
        st.none() | st.sampled_from(["a", "", "日", "n"]),
        st.integers(0, 1),
        st.integers(-(2**63), 2**63 - 1),
    )
)


@settings(max_examples=50)
@given(CLICKS, st.integers(2, 4), st.floats(0.1, 50))
def test_target_encoding_leaves_a_rows_own_fold_out(rows, folds, smoothing):
    op = Target(folds=folds, smoothing=smoothing)
    column = clicks(rows)
    state = op.prepare(learned(op, column))
    fold = op._folds(column.field(2))

    def slow(value, but):
        others = [(v, y) for (v, y, _), f in zip(rows, fold, strict=True) if f != but]
        prior = sum(y for _, y in others) / max(1, len(others))
        own = [y for v, y in others if v == value]
        return (sum(own) + smoothing * prior) / (len(own) + smoothing)

    got = applied(op, column, state=state)
    assert got == [pytest.approx(slow(v, f)) for (v, _, _), f in zip(rows, fold, strict=True)]
    serving = op.apply(
        clicks([(value, None, None) for value in ("a", None, "unseen")]), state
    ).to_pylist()
    assert serving == [pytest.approx(slow(v, None)) for v in ("a", None, "unseen")]


def test_joint_and_updated_vocabularies_never_move_an_id():
    op = Categorify(min_count=1, max_size=4, oov=2)
    old = pa.table({"value": ["b", "a"], "count": pa.array([5, 2], pa.int64())})
    new = pa.table({"value": ["c", "a", "d", "e"], "count": pa.array([9, 4, 3, 1], pa.int64())})
    both = op.update(old, new)
    assert both["value"].to_pylist() == ["b", "a", "c", "d"]
    column = pa.array(["a", "b"])
    assert op.apply(column, op.prepare(old)) == op.apply(column, op.prepare(both))


def double(x: pa.Array) -> pa.Array:
    return pa.compute.multiply(x, 2.0)


@pytest.mark.parametrize("whole", [2**53 + 1, -(2**63)])
def test_a_function_gets_a_large_whole_number_as_the_nearest_float(whole):
    own = Python(function=f"{__name__}:double", inputs=("number",), output="number", size=1)
    assert own.apply(pa.array([whole]), double).to_pylist() == [2.0 * whole]


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_id_of_a_function_that_its_size_does_not_allow_is_an_error(wrong):
    own = Python(function="m:f", inputs=("number",), output="ids", size=4)
    made = pa.array([[wrong], None], pa.list_(pa.int32()))
    with raises(ValueError, f"the id {wrong} ", "0 to 3"):
        own.apply(pa.array([1, 2]), lambda _: made)


@given(st.lists(st.none() | st.text("aB9 Éß-_", max_size=9)))
def test_small_letters_and_patterns(texts):
    column = pa.array(texts, TEXT)
    assert applied(Lower(), column) == [t if t is None else t.lower() for t in texts]
    made = applied(Replace(pattern=r"([0-9])|[ _-]+", to=r"<\1>"), column)
    assert made == [
        t if t is None else re.sub(r"([0-9])|[ _-]+", lambda m: f"<{m[1] or ''}>", t) for t in texts
    ]


def test_the_loader_needs_a_state_and_runs_no_function_of_a_table():
    def left(**op: object) -> Field:
        return Field(name="I", role="dense", type="float", online=(op,))

    with raises(OperatorError, "'I'", "standardise", "fitted state"):
        online(left(op="standardise", state="I/2"), None)
    hostile = left(op="python", function="os:system", inputs=["text"], output="number")
    with raises(OperatorError, "'I'", "'python'", "loader"):
        online(hostile, None)


@settings(max_examples=60)
@given(TEXTS, TEXTS, st.integers(1, 3), st.integers(1, 8), st.integers(1, 4))
def test_categorify_lays_ids_out_as_promised(seen, new, least, most, oov):
    op = Categorify(min_count=least, max_size=most, oov=oov)
    counted = Counter(t for t in seen if t is not None)
    kept = sorted((-n, t.encode(), t) for t, n in counted.items() if n >= least)[:most]
    ids = {None: 1} | {t: 2 + oov + place for place, (_, _, t) in enumerate(kept)}
    names, counts = op.count(pa.array(seen, TEXT))
    assert dict(zip(names.to_pylist(), counts.to_pylist(), strict=True)) == counted
    enough = sorted((t for t, n in counted.items() if n >= op.least), reverse=True)
    table = op.learn(
        pa.table({"value": pa.array(enough, TEXT), "count": [counted[t] for t in enough]})
    )
    assert table["value"].to_pylist() == [t for *_, t in kept]
    got = applied(op, new, TEXT, op.prepare(table))
    assert got == [ids[t] if t in ids else 2 + hashed(t, _BUCKET_SALT) % oov for t in new]
    assert all(i < op.cardinality(table) for i in got)
