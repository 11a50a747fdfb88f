"""Guesses the roles of plain Parquet's columns from names, types and a sample of rows: `proposals`.

A loader takes its roles from the proposals, and `sluice guess` writes a spec from them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.suggest import meant
from sluice.etl.ops.chain import make_labels
from sluice.etl.spec.nested_columns import is_list, is_text
from sluice.ingest.plain.column_kind import (
    is_amount,
    is_named_id,
    label_leaks,
    likely_values,
    numbers_of,
    words_of,
)
from sluice.ingest.plain.probe import ColumnFacts, is_lost
from sluice.ingest.plain.roles import GuessError, ParquetError, label_of
from sluice.ingest.plain.time_guess import (
    TimeGuess,
    TimeReading,
    guess_times,
    share_of_values,
    unit_of_times,
)

LABELS = (
    "label",
    "target",
    "click",
    "clicked",
    "y",
    "conversion",
    "converted",
    "attributed",
    "rating",
    "stars",
)
_POSITIVE = ("1", "true", "yes", "y", "t", "click", "clicked", "positive", "pos")
_SHOWN = 5
_RATINGS = 10
"""A label with at most so many distinct numbers is a rating, and becomes a comparison."""
_WEIGHTS = ("weight", "sample_weight")
_TIMES = re.compile(
    r"(^|_)(ts|time|timestamp|datetime|unixtime|epoch)(_?(ms|us|ns|s|utc))?$|_at$", re.IGNORECASE
)
_USERS = re.compile(
    r"(^|[._])(user|uid|member|visitor|customer|account|session)(_?id)?$", re.IGNORECASE
)
_YEAR_2001 = 10**9  # in seconds since 1970
_HOUR, _TEN_YEARS = 3600, 315_360_000
_UNIQUE, _MANY = 0.95, 1000
"""If this share of at least so many values is distinct, a column identifies rows."""
_SIZES = (*(first * 10**zeros for zeros in range(3, 7) for first in (1, 2, 5)), 10**7)
_IDS = 2**31
_FEW = 0.01
"""At most this share of a label's values may be neither 0 nor 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The guess for one column."""

    name: str
    facts: ColumnFacts
    role: str = ""
    """A role of a loader, or `time`. Empty: the column is left out."""
    size: int = 0
    """For ids: the number of ids to hash to."""
    fits: bool = False
    """For ids: whether a loader can take them unchanged."""
    why: str = ""
    """Why a loader without a spec leaves it out."""
    guess: TimeGuess | None = None
    """For a time: how it is read, and how else it might be."""
    label: str = ""
    """For the label: its name, or the comparison that makes it."""
    rejected: str = ""
    """How many sampled values are no times, no clicks, or no numbers of a log, and an example."""

    @property
    def hash(self) -> int | None:
        """The number of ids to which a loader without a spec hashes the values. None: it takes them unchanged."""
        return self.size if self.size and not self.fits else None

    @property
    def formats(self) -> tuple[str, ...]:
        """For a time as text, or as digits such as 14102100: its formats."""
        return self.guess.reading.formats if self.guess else ()


def proposals(
    facts: Mapping[str, ColumnFacts],
    rows: int,
    label: str | None = None,
    hashed: Iterable[str] = (),
    is_click: bool = False,
) -> dict[str, Proposal]:
    """Makes a proposal for each column. `rows` is the number of all rows, `label` the label's name if it is known.
    Columns in `hashed` become ids, whatever they hold. With `is_click`, or if the label is guessed, a label with a few
    numbers other than 0 and 1, such as ratings, becomes a comparison."""
    is_click |= label is None
    label = label or usual_label(facts)
    columns = f" (columns: {', '.join(list(facts)[:20])})"
    if label is None:
        raise GuessError(
            f"no column is called {', '.join(LABELS[:-1])} or {LABELS[-1]}: say which is the label, "
            f'roles="label=NAME", or `sluice guess --label NAME`{columns}'
        )
    wanted, made = label_of(label, {name: column.type for name, column in facts.items()})
    if wanted not in facts:
        raise ParquetError(
            f"there is no column {wanted!r} to be the label{meant(wanted, facts)}{columns}"
        )
    _check_label(wanted, facts[wanted], is_compared=bool(made))
    least, odd = (None, "") if made else _judge_label(facts[wanted])
    if is_click and least is not None:
        label = f"{wanted} >= {least:g}"
    hashed = set(hashed)
    free = {name: column for name, column in facts.items() if name not in hashed}
    times = guess_times({n: column.sampled for n, column in free.items() if column.sampled})
    proposed = dict[str, Proposal]()
    for name, column in facts.items():
        lost = _describe_lost(column, column.texts, column.sampled)
        blank = Proposal(name=name, facts=column, guess=times.get(name), rejected=lost)
        if name == wanted:
            proposed[name] = replace(blank, role="label", label=label, rejected=lost or odd)
        elif name in free:
            proposed[name] = _proposal(blank, rows)
        else:
            proposed[name] = replace(blank, role="id_list" if is_list(column.type) else "sparse")
    judged = {n: c for n, c in free.items() if proposed[n].role not in ("", "label", "weight")}
    for name, why in label_leaks(judged, label_values(wanted, facts[wanted], label)):
        proposed[name] = replace(proposed[name], role="", why=why)
    return proposed


def _check_label(name: str, facts: ColumnFacts, *, is_compared: bool) -> None:
    """Raises if a column cannot be the label, or only by a comparison."""
    if pa.types.is_temporal(facts.type) or pa.types.is_nested(facts.type):
        raise ParquetError(
            f"the label {name!r} holds {facts.type}: name a column of numbers or texts"
        )
    if is_text(facts.type) and facts.sampled and facts.values and not is_compared:
        texts = sorted(facts.sampled.drop_null().unique().to_pylist())
        positive = next((text for text in texts if text.lower() in _POSITIVE), texts[0])
        raise GuessError(
            f"the label {name!r} holds texts ({', '.join(texts[:_SHOWN])}): say which of them is the "
            f'positive one, for instance roles="label={name} == {positive}", or '
            f"`sluice guess --label '{name} == {positive}'`"
        )


def _describe_lost(facts: ColumnFacts, texts: pa.Array | None, values: pa.Array | None) -> str:
    """Describes the sampled texts that are no numbers, or no times. Empty if there are none."""
    if texts is None or not (lost := is_lost(texts, values)).any():
        return ""
    first = int(lost.argmax())
    place = f" ({facts.places[first]})" if facts.places else ""
    return share_of_values(int(lost.sum()), len(lost), texts[first].as_py()) + place


def usual_label(names: Iterable[str]) -> str | None:
    """Returns the column with a label's name, if there is one. `is_clicked` and `Click?` count too."""
    by_words: dict[str, str] = {}
    for name in names:
        words = [word for word in words_of(name) if word not in ("is", "was", "has")]
        by_words.setdefault("_".join(words), name)
    return next((by_words[name] for name in LABELS if name in by_words), None)


def _judge_label(facts: ColumnFacts) -> tuple[float | None, str]:
    """Returns the rating from which on about half of the rows are positive, if the label holds ratings. If up to 1 % of
    its numbers are neither 0 nor 1, they are errors, and are described."""
    values = numbers_of(facts)
    odd = values[~np.isin(values, (0, 1))]
    if len(odd) <= _FEW * len(values):
        return None, share_of_values(len(odd), len(values), f"{odd[0]:.15g}") if len(odd) else ""
    several = np.unique(values)
    if not 2 <= len(several) <= _RATINGS:
        return None, ""
    return min(several[1:], key=lambda least: abs((values >= least).mean() - 0.5)), ""


def label_values(name: str, facts: ColumnFacts, label: str) -> npt.NDArray[np.float64]:
    """Returns the label of each sampled row, NaN if it is missing. All are NaN if labels other than 0 and 1 occur."""
    if facts.sampled is None:
        return np.zeros(0)
    _, made = label_of(label, {name: facts.type})
    values = make_labels(made, facts.sampled)
    marks = values.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
    return marks if np.isin(marks[~np.isnan(marks)], (0, 1)).all() else np.full(len(marks), np.nan)


def _proposal(blank: Proposal, rows: int) -> Proposal:
    """Completes the proposal for a column that is not the label."""
    name, facts, kind = blank.name, blank.facts, blank.facts.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if name.lower() in _WEIGHTS:
        return replace(blank, role="weight")
    unseen = (
        facts.nulls and facts.known and facts.low is None and not (facts.values or facts.unusable)
    )
    if pa.types.is_null(kind) or (unseen and not is_list(kind)):
        return replace(blank, why="no value was seen")
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return replace(blank, role="time", why="a time", guess=TimeGuess(TimeReading()))
    is_whole = pa.types.is_integer(kind)
    if is_whole and (time := _time_of_numbers(blank, kind.bit_width)):
        return time
    is_fraction = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    is_number = (
        pa.types.is_boolean(kind)
        or (is_fraction and not _are_ids(name, facts))
        or (is_whole and is_amount(name, facts))
    )
    if is_number:
        return replace(blank, role="dense")
    role, inner = ("id_list", kind.value_type) if is_list(kind) else ("sparse", kind)
    if is_fraction or pa.types.is_integer(inner) or is_text(inner):
        return _ids(replace(blank, role=role), inner, rows)
    vector = 'a vector; read it as floats, and op = "bag" makes a number of it'
    is_vector = is_list(kind) and pa.types.is_floating(inner)
    return replace(blank, why=f"{kind}, {vector}" if is_vector else str(kind))


def _ids(guessed: Proposal, inner: pa.DataType, rows: int) -> Proposal:
    """Completes the proposal for a column of ids, or of texts that may be times. `inner` is the type of a value."""
    facts, is_single = guessed.facts, guessed.role == "sparse"
    left_out = replace(guessed, role="")
    if is_text(inner) and not facts.values:
        return replace(left_out, why="text of which no value was seen; hash= makes ids of it")
    if is_single and is_text(inner) and guessed.guess:
        return _judge_time(replace(guessed, role="time", why="a time as text"))
    likely = likely_values(facts, rows)
    if (
        is_single
        and facts.values >= _MANY
        and facts.distinct >= _UNIQUE * facts.values
        and (is_text(inner) or likely >= _UNIQUE * rows)
        and not _USERS.search(guessed.name)
    ):
        what = "text" if is_text(inner) else "a number"
        return replace(left_out, why=f"{what} that differs in nearly every row")
    fits = (
        pa.types.is_integer(inner)
        and (facts.low is None or 0 <= facts.low <= facts.high < _IDS)
        and not (facts.nulls if is_single else pa.types.is_fixed_size_list(facts.type))
    )
    size = next((size for size in _SIZES if size >= 4 * likely), _SIZES[-1])
    return replace(guessed, fits=fits, size=size)


def _time_of_numbers(blank: Proposal, bits: int) -> Proposal | None:
    """Returns the proposal for a column of whole numbers that holds times: since 1970 in any unit, or as digits. None
    if it does not."""
    name, low, high = blank.name, blank.facts.low, blank.facts.high
    named = is_named_id(name)
    time = replace(blank, role="time", why="looks like a time")
    if blank.guess and named is not False:
        return _judge_time(time)
    unit, is_named = unit_of_times(low, high), _TIMES.search(name)
    if not unit:
        return replace(time, role="", guess=None) if is_named else None
    # Ids may be as large as times. Ids that are counted up lie within an hour, and ids as large as the seconds of the
    # years before 2001 are seldom close together.
    is_likely = (
        bits >= 32
        and named is None
        and high - low >= _HOUR * unit
        and (low >= _YEAR_2001 * unit or high - low < _TEN_YEARS * unit)
    )
    guess = TimeGuess(TimeReading(unit=unit))
    return replace(time, guess=guess) if is_named or is_likely else None


def _judge_time(time: Proposal) -> Proposal:
    """Completes the proposal for a time as text or as digits. If it has two readings, it is left out."""
    facts, guess = time.facts, time.guess
    assert guess
    if guess.is_open:
        return replace(time, role="", why=f"a time with two readings: {guess.example}")
    if not is_text(facts.type):
        return time
    seconds = guess.reading.seconds(facts.sampled)
    lost = _describe_lost(facts, facts.sampled, seconds)
    ends = pc.min_max(seconds).as_py().values()
    low, high = (datetime.datetime.fromtimestamp(end, datetime.UTC) for end in ends)
    return replace(time, facts=replace(facts, low=low, high=high), rejected=lost)


def _are_ids(name: str, facts: ColumnFacts) -> bool:
    """Whether floats are ids, by their name and whole values. Missing values may turn whole numbers into floats."""
    values = numbers_of(facts)
    return bool(is_named_id(name) and len(values) and (np.floor(values) == values).all())


def user_of(proposed: Mapping[str, Proposal]) -> str | None:
    """Returns the column of users, by which rows are best split. None if there is none."""
    users = (
        name
        for name, proposal in proposed.items()
        if _USERS.search(name)
        and proposal.role not in ("", "label")
        and not proposal.facts.optional
    )
    return next(users, None)
