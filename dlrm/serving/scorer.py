"""Answers many requests by one pass through the model: `Scorer`. It is independent of HTTP and threads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice.dlrm.serving.decode import JSON, Decoder, Refusal, RequestRows
from sluice.dlrm.serving.served_model import BadValue, Servable

_PASS_ROWS = 8192  # the most rows of one pass through the model, which bounds its memory
_ROW_BYTES = 512


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """A request for predictions, as it came."""

    content_type: str
    body: bytes

    @property
    def size(self) -> int:
        """An estimate of the work: the bytes, and a share for each row of JSON, because a short row takes its time."""
        return len(self.body) + _ROW_BYTES * self.body.count(b"{")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Predictions, and which model made them."""

    probabilities: list[float]
    step: int
    version: int
    missing: Mapping[str, int] = field(default_factory=dict)
    """For each feature, the number of rows that got the spec's default."""

    def to_dict(self) -> dict[str, Any]:
        return {"probabilities": self.probabilities, "step": self.step, "version": self.version}


class Scorer:
    """Answers requests with one model. For a new model, the server makes another Scorer."""

    def __init__(self, servable: Servable, *, most_rows: int) -> None:
        self.servable = servable
        self.decoder = Decoder(servable.spec, servable.fingerprint, most_rows=most_rows)

    def warm_up(self) -> None:
        """Answers rows without features. This builds everything that is built at first use."""
        for rows in (1, 1024):
            self.answer([PredictRequest(JSON, b'{"rows":[%s]}' % b",".join([b"{}"] * rows))])

    def answer(self, requests: Sequence[PredictRequest]) -> list[Answer | Refusal]:
        """Returns one answer for each request. A bad request does not affect the others."""
        read = self.decoder.read_all([(request.content_type, request.body) for request in requests])
        answers: list[Answer | Refusal | None] = [
            rows if isinstance(rows, Refusal) else None for rows in read
        ]
        decoded = [(n, rows) for n, rows in enumerate(read) if isinstance(rows, RequestRows)]
        # A pass through the model has at most _PASS_ROWS rows, or one larger request.
        passes: list[list[tuple[int, RequestRows]]] = []
        rows_in_pass = 0
        for number, rows in decoded:
            if not passes or rows_in_pass + rows.count > _PASS_ROWS:
                passes.append([])
                rows_in_pass = 0
            passes[-1].append((number, rows))
            rows_in_pass += rows.count
        for requests_of_pass in passes:
            for number, answer in self._answer_together(requests_of_pass):
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
            if isinstance(error, BadValue):
                error = Refusal(422, f"rows[{error.rows[0]}]: {error}")
            if len(decoded) == 1:
                return [(decoded[0][0], error)]
            half = len(decoded) // 2
            return [
                answer
                for part in (decoded[:half], decoded[half:])
                for answer in self._answer_together(part)
            ]
        ends = itertools.accumulate(rows.count for _, rows in decoded)
        return [
            (number, self._answer(rows, values[end - rows.count : end]))
            for (number, rows), end in zip(decoded, ends, strict=True)
        ]

    def _answer(self, rows: RequestRows, values: list[float]) -> Answer:
        meta = self.servable.meta
        return Answer(
            probabilities=values, step=meta.step, version=meta.version, missing=rows.missing
        )
