"""Counts of rows: what batches counted is added up, in any order and in any groups, to what one batch counts."""

from collections import Counter
from random import Random

import pyarrow as pa
import pytest

from sluice.etl.apply.row_counts import COUNTS, RowCounts
from tests.product import CountSums


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_shares_are_those_of_the_inspected_rows(rows):
    counts = RowCounts(inspected=rows, missing={"a": rows, "b": 0})
    assert counts.nulls == {"a": min(rows, 1), "b": 0}


@pytest.mark.parametrize("seed", range(20))
def test_counts_of_drawn_batches_add_up_in_any_order_and_in_any_groups(seed):
    draw = Random(seed)
    rows = [
        {
            "fault": draw.choice([None, None, "a: missing", 'b: "odd"']),
            "kept": draw.random() < 0.7,
            "price": draw.choice(["", "1", "x", "é"]),
        }
        for _ in range(draw.randrange(1, 60))
    ]
    whole = count(rows)
    others = pa.record_batch([[0], ["7"], [3]], schema=COUNTS)
    batches = [others]
    while rows:
        size = draw.randrange(1, 6)
        batches.append(count(rows[:size]).batch())
        rows = rows[size:]
    draw.shuffle(batches)
    tasks = [CountSums(1 << 20, {}) for _ in range(2)]
    for batch in batches:
        draw.choice(tasks).add([batch])
    sums = pa.concat_tables([COUNTS.empty_table(), *(table for t in tasks for table in t.tables())])
    for task in tasks:
        task.close()
    assert RowCounts.of(sums) == whole


def count(rows):
    good = [row for row in rows if row["fault"] is None]
    prices = Counter(row["price"] for row in good)
    odd = sorted(prices.keys() & {"x", "é"})
    return RowCounts(
        parsed=len(good),
        rows=sum(row["kept"] for row in good),
        rejected=dict(Counter(row["fault"] for row in rows if row["fault"] is not None)),
        inspected=len(good),
        missing={"price": prices[""]},
        unreadable={"price": sum(prices[text] for text in odd)},
        examples={"price": odd[0]} if odd else {},
    )
