"""Writes synthetic clicks as raw logs: text put together column by column in numpy, or Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from sluice.etl.synth.criteo import CATEGORIES, COLUMNS, INTEGERS, BestAUC, Clicks, SyntheticRows

Bytes = npt.NDArray[np.uint8]
_CHUNK = 32_768
_AHEAD = 4
_HEX = np.frombuffer(b"".join(b"%04x" % i for i in range(65536)), np.uint8).reshape(65536, 4)
_PADDED = np.frombuffer(b"".join(b"%04d" % i for i in range(10000)), np.uint8).reshape(10000, 4)
# The same without leading zeros: bytes of value 0 are left out when a chunk is put together.
_BARE = np.frombuffer(
    b"".join(b"%d" % i if i > 999 else (b"%d" % i).rjust(4, b"\0") for i in range(10000)), np.uint8
).reshape(10000, 4)


def synthesize(
    target: Path,
    *,
    rows: int,
    seed: int = 0,
    form: str = "tsv",
    days: int = 1,
    progress: TextIO | None = None,
) -> dict[str, float]:
    """Writes `rows` clicks to a file, or to `day_0 …` in a folder if there are several days; the same bytes for the
    same seed and days. Returns rows, bytes, label rate and bayes_auc."""
    best = BestAUC()
    clicked = 0
    written = 0
    clicks = Clicks(seed)
    bounds = [rows * day // days for day in range(days + 1)]
    (target if days > 1 else target.parent).mkdir(parents=True, exist_ok=True)
    done = 0
    with ThreadPoolExecutor(2, "sluice-synth") as pool:
        for day in range(days):
            path = target / f"day_{day}.{form}" if days > 1 else target
            starts = range(bounds[day], bounds[day + 1], _CHUNK)
            chunks = _in_order(
                pool,
                [
                    partial(
                        _chunk,
                        clicks,
                        first,
                        min(_CHUNK, bounds[day + 1] - first),
                        day=day,
                        form=form,
                    )
                    for first in starts
                ],
            )
            with _Sink(path, form) as sink:
                for part, content in chunks:
                    sink.write(content)
                    best.add(part.probability)
                    clicked += int(part.label.sum())
                    done += len(part)
                    if progress is not None and progress.isatty():
                        progress.write(f"\r\x1b[2K{done:,} of {rows:,} rows")
            written += path.stat().st_size
    if progress is not None:
        progress.write(
            ("\r\x1b[2K" if progress.isatty() else "")
            + f"{done:,} rows, {written:,} bytes in {target}\n"
        )
    return {
        "rows": rows,
        "bytes": written,
        "label_rate": round(clicked / max(rows, 1), 4),
        "bayes_auc": round(best.value, 4),
    }


def _in_order(
    pool: ThreadPoolExecutor, makers: list[Callable[[], tuple[SyntheticRows, bytes | pa.Table]]]
) -> Iterator[tuple[SyntheticRows, bytes | pa.Table]]:
    """Yields results in order, a few of them made ahead."""
    waiting = [pool.submit(make) for make in makers[:_AHEAD]]
    for number in range(len(makers)):
        yield waiting.pop(0).result()
        if number + _AHEAD < len(makers):
            waiting.append(pool.submit(makers[number + _AHEAD]))


class _Sink:
    """One file that rows are written to, text or Parquet."""

    def __init__(self, path: Path, form: str) -> None:
        self._path, self._form = path, form

    def __enter__(self) -> _Sink:
        self._file = open(self._path, "wb")
        parquet = self._form == "parquet"
        self._parquet = (
            pq.ParquetWriter(self._file, raw_schema(), compression="zstd") if parquet else None
        )
        return self

    def write(self, content: bytes | pa.Table) -> None:
        if self._parquet is not None:
            self._parquet.write_table(content)
        else:
            self._file.write(content)

    def __exit__(self, *_: object) -> None:
        if self._parquet is not None:
            self._parquet.close()
        self._file.close()


def raw_schema() -> pa.Schema:
    return pa.schema(
        [
            ("label", pa.int32()),
            *((n, pa.int32()) for n in INTEGERS),
            *((n, pa.string()) for n in CATEGORIES),
        ]
    )


def _chunk(
    clicks: Clicks, first: int, count: int, *, day: int, form: str
) -> tuple[SyntheticRows, bytes | pa.Table]:
    rows = clicks.rows(first, count, day)
    if form == "parquet":
        return rows, _table(rows)
    return rows, _text(rows, form)


def _text(rows: SyntheticRows, form: str) -> bytes:
    pieces: list[Bytes] = []
    separator = {"tsv": b"\t", "csv": b",", "json": b","}[form]
    for number, name in enumerate(COLUMNS):
        before = separator if number else b""
        if form == "json":
            before = (
                (b"{" if not number else before)
                + b'"%s":' % name.encode()
                + (b'"' if name in CATEGORIES else b"")
            )
        after = b'"' if form == "json" and name in CATEGORIES else b""
        if name == "label":
            value = rows.label[:, None].view(np.uint8) + np.uint8(ord("0"))
        else:
            value = (
                _digits(rows.counts[name]) if name in INTEGERS else _hexadecimal(rows.codes(name))
            )
        field = np.hstack([_constant(before, len(rows)), value, _constant(after, len(rows))])
        if name in rows.nulls:
            # In JSON a null is left out together with its name.
            keep = 0 if form == "json" else len(before)
            field[rows.nulls[name], keep:] = 0
        pieces.append(field)
    pieces.append(_constant(b"}\n" if form == "json" else b"\n", len(rows)))
    whole = np.hstack(pieces).ravel()
    return bytes(whole[whole != 0])


def _constant(text: bytes, rows: int) -> Bytes:
    return np.broadcast_to(np.frombuffer(text, np.uint8), (rows, len(text)))


def _digits(values: npt.NDArray[np.int64]) -> Bytes:
    """Returns the text of numbers between -10^8 and 10^8 in nine bytes each. Bytes of value 0 are left out later."""
    size = np.abs(values)
    high, low = size // 10_000, size % 10_000
    text = np.zeros((len(values), 9), np.uint8)
    text[values < 0, 0] = ord("-")
    text[:, 1:5] = np.where(high[:, None] > 0, _BARE[high], 0)
    text[:, 5:] = np.where(high[:, None] > 0, _PADDED[low], _BARE[low])
    return text


def _hexadecimal(values: npt.NDArray[np.uint32]) -> Bytes:
    return np.hstack([_HEX[values >> np.uint32(16)], _HEX[values & np.uint32(0xFFFF)]])


def _table(rows: SyntheticRows) -> pa.Table:
    columns = []
    for field in raw_schema():
        mask = rows.nulls.get(field.name)
        if field.name in CATEGORIES:
            text = _hexadecimal(rows.codes(field.name)).tobytes()
            offsets = np.arange(len(rows) + 1, dtype=np.int32) * 8
            whole = pa.StringArray.from_buffers(
                len(rows), pa.py_buffer(offsets), pa.py_buffer(text)
            )
            columns.append(
                whole if mask is None else pa.compute.if_else(pa.array(~mask), whole, None)
            )
        else:
            values = rows.label if field.name == "label" else rows.counts[field.name]
            columns.append(pa.array(values.astype(np.int32), mask=mask))
    return pa.table(columns, schema=raw_schema())
