"""Gives Arrow arrays with drawn faults to everything that takes the result of a user's function.

It is a program of its own, because offsets that are believed end the process that follows them. The last line of its
output has how often each place refused an array, and what it did wrong."""

import json
import sys
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow as pa

from sluice import takes_matrix
from sluice.common.errors import OperatorError
from sluice.ingest.process import protocol
from sluice.ingest.process.child_main import new_columns
from sluice.ingest.process.row_call import decode, encode
from tests.product import Python, asking_for, call_on_rows

ROWS = 6
GIVES = {
    "list": pa.list_(pa.int32()),
    "large": pa.large_list(pa.int32()),
    "text": pa.string(),
    "inner": pa.list_(pa.list_(pa.int32())),
    "code": pa.dictionary(pa.int8(), pa.string()),
    "part": pa.struct([("list", pa.list_(pa.int32()))]),
}


def ends(rng, values, kind=np.int32):
    """Offsets of ROWS lists, one of which may be drawn, and whether they may be followed."""
    offsets = np.sort(np.append(rng.integers(0, values + 1, ROWS - 1), [0, values])).astype(kind)
    if rng.random() < 0.8:
        offsets[rng.integers(1, ROWS)] = rng.choice(  # pyarrow itself checks the first and the last
            [-1, values + 1, 2**20, 2**31 - 1, rng.integers(-(2**31), 2**31)]
        )
    return offsets, bool((np.diff(offsets) >= 0).all() and 0 <= offsets[0] <= offsets[-1] <= values)


def drawn(rng, name):
    """An array of a kind, and whether it is valid."""
    numbers = pa.array(np.arange(20, dtype=np.int32))
    wide = name == "large"
    offsets, valid = ends(rng, 20, np.int64 if wide else np.int32)
    places = pa.py_buffer(offsets)
    if name == "code":
        codes = rng.integers(0, 3 + 3 * (rng.random() < 0.7), ROWS).astype(np.int8)
        words = pa.array(["a", "b", "c"])
        return pa.DictionaryArray.from_arrays(pa.array(codes), words, safe=False), codes.max() < 3
    if name == "text":
        return pa.Array.from_buffers(
            GIVES[name], ROWS, [None, places, pa.py_buffer(b"x" * 20)]
        ), valid
    kind = GIVES["large" if wide else "list"]
    lists = pa.Array.from_buffers(kind, ROWS, [None, places], children=[numbers])
    if name == "inner":
        few = pa.py_buffer(np.minimum(np.arange(ROWS + 1), ROWS).astype(np.int32))
        return pa.Array.from_buffers(GIVES[name], ROWS, [None, few], children=[lists]), valid
    if name == "part":
        return pa.Array.from_buffers(GIVES[name], ROWS, [None], children=[lists]), valid
    return lists, valid


def places(name, array):
    """What takes the result of a function, by its name."""
    rows = pa.record_batch({"row": pa.array(range(ROWS))})
    asked = rows.replace_schema_metadata(asking_for(pa.schema([(name, GIVES[name])])))
    frame = json.dumps({"removed": ["row"], "shapes": {name: []}})
    framed = rows.replace_schema_metadata(asking_for(pa.schema([(name, GIVES[name])]), frame))
    series = pd.Series(pd.arrays.ArrowExtensionArray(pa.chunked_array([array])))
    made = pa.record_batch([array], [name])

    yield "rows", lambda: call_on_rows(lambda _: {name: array}, asked)
    yield "rows of a process", lambda: decode(call_on_rows(lambda _: {name: array}, encode(asked)))
    yield "rows as a pandas column", lambda: call_on_rows(lambda _: {name: series}, asked)
    yield "a frame", lambda: call_on_rows(lambda _: pd.DataFrame({name: series}), framed)
    yield "sent rows", lambda: decode(encode(made))
    if name == "code":
        return
    yield "a batch", lambda: new_columns(lambda _: {"x": array}, {"x": np.arange(ROWS)})
    yield "a batch's pandas column", lambda: new_columns(lambda _: {"x": series}, {})
    yield "a matrix", lambda: takes_matrix(lambda _: array)({"x": np.arange(ROWS)})
    if name == "text":
        own = Python(function="m:f", inputs=("number",), output="text")
        yield "an operator", lambda: own.apply(pa.array([0.0] * ROWS), lambda _: array)
    if name == "list":
        own = Python(function="m:f", inputs=("number",), output="ids", size=99)
        yield "an operator", lambda: own.apply(pa.array([0.0] * ROWS), lambda _: array)


def main(seed):
    rng, refused, accepted, wrong = np.random.default_rng(int(seed)), Counter(), Counter(), []
    for _ in range(40):
        for name in GIVES:
            array, valid = drawn(rng, name)
            for place, take in places(name, array):
                try:
                    protocol.check_arrow(take(), "the result")
                    accepted[place] += 1
                    if not valid:
                        wrong.append(f"{place}: an array with faults was taken")
                except (ValueError, OperatorError) as error:
                    refused[place] += "valid" in str(error)
                    if valid:
                        wrong.append(f"{place}: {error}"[:300])
    print(json.dumps({"refused": refused, "accepted": accepted, "wrong": wrong[:10]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
