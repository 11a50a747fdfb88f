"""Requests without a model: `decoded` gives their features, and `scorer` answers each row with its own values."""

from types import SimpleNamespace

import pyarrow as pa

from tests.product import Decoder, Refusal, Scorer, Spec


def decoded(decoder: Decoder, *bodies: bytes) -> dict[str, pa.Array]:
    """Raises the first refusal."""
    counts, columns = decoder.read(bodies, problems := {})
    for row, text in problems.items():
        raise Refusal(422, f"rows[{row}]: {text}")
    for refusal in counts:
        if isinstance(refusal, Refusal):
            raise refusal
    return columns


def scorer(spec: Spec, fingerprint: str = "", most_rows: int = 99) -> Scorer:
    """Its answers to rows that have a problem are left to the scorer."""
    return Scorer(
        SimpleNamespace(
            features=SimpleNamespace(spec=spec),
            meta=SimpleNamespace(step=1, version=0, fingerprint={"layout": fingerprint}),
            about=lambda: {"step": 1, "version": 0, "table_bytes": 0},
            probabilities=lambda columns, _: pa.StructArray.from_arrays(
                list(columns.values()), list(columns)
            ),
        ),
        most_rows=most_rows,
    )
