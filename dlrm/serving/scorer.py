"""Answers many requests by one pass through the model: `Scorer`. It knows nothing of HTTP, threads or clocks."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.dlrm.serving.decode import JSON, Decoder, Refusal, RequestRows, rows_at_most
from sluice.dlrm.serving.pace import Pace
from sluice.dlrm.serving.served_model import BadValue, Servable

_PASS_ROWS = 8192  # rows of a batch that pass at once, so that its memory is bounded
_ROW_BYTES = 512
_WARM_ROWS, _WARM_TIMES = 1024, 3


@dataclass(frozen=True, slots=True)
class PredictRequest:
    content_type: str
    body: bytes

    @property
    def units(self) -> int:
        """Units of work: each row is one, and so is each _ROW_BYTES of the body."""
        return rows_at_most(self.content_type, self.body) + len(self.body) // _ROW_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Predictions, and which model made them."""

    probabilities: list[float]
    step: int
    version: int
    missing: Mapping[str, int] = field(default_factory=dict)
    """Feature → number of rows in which the spec's default stood for it."""

    def to_dict(self) -> dict[str, Any]:
        return {"probabilities": self.probabilities, "step": self.step, "version": self.version}


class Scorer:
    """Answers with one model; another takes over by `scorer = Scorer(…)`, while this one finishes what it has begun."""

    def __init__(self, servable: Servable, *, most_rows: int) -> None:
        self.servable = servable
        self.decoder = Decoder(servable.spec, servable.fingerprint, most_rows=most_rows)

    def warmed_up(self, clock: Callable[[], float] = time.perf_counter) -> Pace:
        """Measures how fast it is, on rows that name no feature; things that are built at first use are built then."""
        best = []
        for rows in (1, _WARM_ROWS):
            request = PredictRequest(JSON, b'{"rows":[%s]}' % b",".join([b"{}"] * rows))
            times = []
            for _ in range(_WARM_TIMES):
                began = clock()
                self.answer([request])
                times.append(clock() - began)
            best.append((request.units, min(times)))
        return Pace.of(best[0], best[1])

    def answer(self, requests: Sequence[PredictRequest]) -> list[Answer | Refusal]:
        """One answer for each request: one that cannot be answered does not affect the others."""
        found: list[Answer | Refusal | None] = [None] * len(requests)
        read: list[tuple[int, RequestRows]] = []
        for place, request in enumerate(requests):
            try:
                read.append((place, self.decoder.read(request.content_type, request.body)))
            except Refusal as refusal:
                found[place] = refusal
        for some in _passes(read):
            for place, answer in self._together(some):
                found[place] = answer
        return [f for f in found if f is not None]

    def _together(self, read: list[tuple[int, RequestRows]]) -> list[tuple[int, Answer | Refusal]]:
        if not any(rows.count for _, rows in read):
            return [(place, self._answer(rows, [])) for place, rows in read]
        try:
            values = self.servable.probabilities(self.decoder.columns([rows for _, rows in read])).tolist()
        except (Refusal, BadValue) as error:
            if len(read) == 1:
                return [(read[0][0], error if isinstance(error, Refusal) else Refusal(422, _where(error)))]
            return [one for each in read for one in self._together([each])]
        answers: list[tuple[int, Answer | Refusal]] = []
        for (place, rows), end in zip(read, itertools.accumulate(r.count for _, r in read), strict=True):
            answers.append((place, self._answer(rows, values[end - rows.count:end])))
        return answers

    def _answer(self, rows: RequestRows, values: list[float]) -> Answer:
        meta = self.servable.meta
        return Answer(probabilities=values, step=meta.step, version=meta.version, missing=Counter(rows.missing))


def _where(error: BadValue) -> str:
    return f"rows[{error.rows[0]}]: {error}"


def _passes(read: list[tuple[int, RequestRows]]) -> list[list[tuple[int, RequestRows]]]:
    found: list[list[tuple[int, RequestRows]]] = []
    held = 0
    for one in read:
        if not found or held + one[1].count > _PASS_ROWS:
            found.append([])
            held = 0
        found[-1].append(one)
        held += one[1].count
    return found
