"""Answers many requests by one pass through the model: `Scorer`. It is independent of HTTP and threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from sluice.dlrm.serving.decode import Decoder, Refusal
from sluice.dlrm.serving.served_model import Servable
from sluice.etl.apply.lookups import Problems


class Answer(NamedTuple):
    """Predictions, and which model made them."""

    probabilities: list[float]
    step: int
    version: int
    population: Literal["all", "sampled"]
    """The rows whose probabilities these are: see `RowRules.population`."""


class Scorer:
    """Answers requests with one model. For a new model, the server makes another Scorer."""

    def __init__(self, servable: Servable, *, most_rows: int) -> None:
        self.servable = servable
        # A request may name the features that it is for. It is refused if the model has others by then.
        fingerprint = servable.meta.fingerprint["layout"]
        self.decoder = Decoder(servable.features.spec, fingerprint, most_rows=most_rows)
        self.missing = Counter[str]()
        """For each feature, the number of rows that got the spec's default."""

    def answer(self, bodies: Sequence[bytes]) -> list[Answer | Refusal]:
        """Returns one answer for each request. A bad request does not affect the others."""
        problems: Problems = {}
        counts, columns = self.decoder.read(bodies, problems)
        self.missing.update(
            {n: nulls for n, array in columns.items() if (nulls := array.null_count)}
        )
        values: list[float] = []
        if any(map(len, columns.values())):
            values = self.servable.probabilities(columns, problems).tolist()
        meta, population = self.servable.meta, self.servable.features.spec.rows.population
        answers: list[Answer | Refusal] = []
        end = 0
        for count in counts:
            if isinstance(count, Refusal):
                answers.append(count)
                continue
            first, end = end, end + count
            wrong = next((row for row in problems if first <= row < end), None)
            answers.append(
                Answer(values[first:end], meta.step, meta.version, population)
                if wrong is None
                else Refusal(422, f"rows[{wrong - first}]: {problems[wrong]}")
            )
        return answers
