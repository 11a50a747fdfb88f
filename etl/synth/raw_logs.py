"""Writes synthetic clicks as raw logs: lines of values with tabs between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl.synth.criteo import CATEGORIES, COLUMNS, BestAUC, Clicks, SyntheticRows

_CHUNK = 32_768
_AHEAD = 4
_Chunk = tuple[SyntheticRows, bytes]


def synthesize(
    target: Path,
    *,
    rows: int,
    seed: int = 0,
    days: int = 1,
    progress: TextIO | None = None,
) -> dict[str, float]:
    """Writes `rows` clicks to a file, or to `day_0.tsv …` in a folder if there are several days; the same bytes for the
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
            path = target / f"day_{day}.tsv" if days > 1 else target
            end = bounds[day + 1]

            def make(first: int, day: int = day, end: int = end) -> _Chunk:
                part = clicks.rows(first, min(_CHUNK, end - first), day)
                return part, _lines(part)

            with open(path, "wb") as file:
                for part, content in _in_order(pool, make, range(bounds[day], end, _CHUNK)):
                    file.write(content)
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
    pool: ThreadPoolExecutor, make: Callable[[int], _Chunk], starts: Iterable[int]
) -> Iterator[_Chunk]:
    """Yields chunks in order, a few of them made ahead."""
    waiting = deque[Any]()
    for start in starts:
        waiting.append(pool.submit(make, start))
        if len(waiting) >= _AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _lines(rows: SyntheticRows) -> bytes:
    columns = []
    for name in COLUMNS:
        mask = rows.nulls.get(name)
        if name in CATEGORIES:
            text = rows.codes(name).astype(">u4").tobytes().hex().encode()
            offsets = np.arange(0, len(text) + 1, 8, dtype=np.int32)
            values = pa.StringArray.from_buffers(
                len(rows), pa.py_buffer(offsets), pa.py_buffer(text)
            )
        else:
            numbers = rows.label if name == "label" else rows.counts[name]
            values = pa.array(numbers.astype(np.int32)).cast(pa.string())
        columns.append(values if mask is None else pc.if_else(pa.array(mask), "", values))
    lines = pc.binary_join_element_wise(*columns, "\t")
    return "".join(f"{line}\n" for line in lines.to_pylist()).encode()
