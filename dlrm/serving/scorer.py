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
    """A request for predictions, as it came."""

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
        """Measures how fast the model is, on rows that name no feature; what is built at first use is built then."""
        batches = []
        for rows in (1, _WARM_ROWS):
            request = PredictRequest(JSON, b'{"rows":[%s]}' % b",".join([b"{}"] * rows))
            times = []
            for _ in range(_WARM_TIMES):
                begun_at = clock()
                self.answer([request])
                times.append(clock() - begun_at)
            batches.append((request.units, min(times)))
        return Pace.from_two_batches(batches[0], batches[1])

    def answer(self, requests: Sequence[PredictRequest]) -> list[Answer | Refusal]:
        """One answer for each request: one that cannot be answered does not affect the others."""
        answers: list[Answer | Refusal | None] = [None] * len(requests)
        decoded: list[tuple[int, RequestRows]] = []
        for number, request in enumerate(requests):
            try:
                decoded.append((number, self.decoder.read(request.content_type, request.body)))
            except Refusal as refusal:
                answers[number] = refusal
        for group in _passes(decoded):
            for number, answer in self._answer_together(group):
                answers[number] = answer
        return [answer for answer in answers if answer is not None]

    def _answer_together(
        self, decoded: list[tuple[int, RequestRows]]
    ) -> list[tuple[int, Answer | Refusal]]:
        if not any(rows.count for _, rows in decoded):
            return [(number, self._answer(rows, [])) for number, rows in decoded]
        try:
            values = self.servable.probabilities(
                self.decoder.columns([rows for _, rows in decoded])
            ).tolist()
        except (Refusal, BadValue) as error:
            if len(decoded) == 1:
                return [
                    (
                        decoded[0][0],
                        error if isinstance(error, Refusal) else Refusal(422, _message(error)),
                    )
                ]
            return [answer for each in decoded for answer in self._answer_together([each])]
        answers: list[tuple[int, Answer | Refusal]] = []
        for (number, rows), end in zip(
            decoded, itertools.accumulate(r.count for _, r in decoded), strict=True
        ):
            answers.append((number, self._answer(rows, values[end - rows.count : end])))
        return answers

    def _answer(self, rows: RequestRows, values: list[float]) -> Answer:
        meta = self.servable.meta
        return Answer(
            probabilities=values,
            step=meta.step,
            version=meta.version,
            missing=Counter(rows.missing),
        )


def _message(error: BadValue) -> str:
    return f"rows[{error.rows[0]}]: {error}"


def _passes(decoded: list[tuple[int, RequestRows]]) -> list[list[tuple[int, RequestRows]]]:
    """Cuts requests into groups of at most _PASS_ROWS rows; a larger request is a group of its own."""
    passes: list[list[tuple[int, RequestRows]]] = []
    rows_in_pass = 0
    for request in decoded:
        if not passes or rows_in_pass + request[1].count > _PASS_ROWS:
            passes.append([])
            rows_in_pass = 0
        passes[-1].append(request)
        rows_in_pass += request[1].count
    return passes
