"""Answers many requests by one pass through the model: `Scorer`. It is independent of HTTP and threads."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa

from sluice.dlrm.serving.decode import Decoder, Refusal, columns_of
from sluice.dlrm.serving.served_model import BadValue, Servable

_PASS_ROWS = 8192  # the most rows of one pass through the model, which bounds its memory
_ROW_BYTES = 512


def work_of(body: bytes) -> int:
    """Estimates the work of a request: its bytes, and a share for each row, because a short row takes its time."""
    return len(body) + _ROW_BYTES * body.count(b"{")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Predictions, and which model made them."""

    probabilities: list[float]
    step: int
    version: int

    def to_dict(self) -> dict[str, Any]:
        return {"probabilities": self.probabilities, "step": self.step, "version": self.version}


class Scorer:
    """Answers requests with one model. For a new model, the server makes another Scorer."""

    def __init__(self, servable: Servable, *, most_rows: int) -> None:
        self.servable = servable
        self.decoder = Decoder(servable.spec, servable.fingerprint, most_rows=most_rows)
        self.missing: Mapping[str, int] = {}
        """For each feature, the number of rows of the last call of `answer` that got the spec's default."""

    def warm_up(self) -> None:
        """Answers rows without features. This builds everything that is built at first use."""
        for rows in (1, 1024):
            self.answer([b'{"rows":[%s]}' % b",".join([b"{}"] * rows)])

    def answer(self, bodies: Sequence[bytes]) -> list[Answer | Refusal]:
        """Returns one answer for each request. A bad request does not affect the others."""
        counts, rows = self.decoder.read_all(bodies)
        answers: list[Any] = list(counts)
        waiting = [n for n, count in enumerate(counts) if not isinstance(count, Refusal)]
        meta = self.servable.meta
        missing: Counter[str] = Counter()
        while waiting:
            ends = list(accumulate(answers[number] for number in waiting))
            # A pass through the model has at most _PASS_ROWS rows, or one larger request.
            together = max(1, bisect_right(ends, _PASS_ROWS))
            last = ends[together - 1]
            columns = columns_of(rows.slice(0, last))
            try:
                values = self.servable.probabilities(columns).tolist() if last else []
            except BadValue as error:
                place = bisect_right(ends, error.row)
                first, end = [0, *ends][place : place + 2]
                answers[waiting.pop(place)] = Refusal(422, f"rows[{error.row - first}]: {error}")
                rows = pa.concat_arrays([rows.slice(0, first), rows.slice(end)])
                continue
            for number, (first, end) in zip(waiting[:together], pairwise([0, *ends]), strict=False):
                answers[number] = Answer(
                    probabilities=values[first:end], step=meta.step, version=meta.version
                )
            missing.update(
                {n: nulls for n, array in columns.items() if (nulls := array.null_count)}
            )
            del waiting[:together]
            rows = rows.slice(last)
        self.missing = missing
        return answers
