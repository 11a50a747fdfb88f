"""The first sentence about a run is its whole rate and its largest loss, by drawn runs whose loss is known."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice import Loader
from sluice.agent.report import page
from sluice.agent.report.outcome import RunOutcome
from sluice.agent.report.story import last_lines
from tests.agent.grown_run import written
from tests.product import RowsPlan, Run, Story, seconds
from tests.raises import assert_names


def drawn(chance: random.Random, cause: str) -> tuple[RunOutcome, float]:
    """Figures of a run with one large loss, and the seconds of that loss."""
    total = chance.uniform(10, 5000)
    lost = chance.uniform(0.3, 0.8) * total
    small = {name: chance.uniform(0, 0.08) * total for name in ("start", "evaluation")}
    spent = {**small, cause: lost} if cause in small else small
    trained = total - sum(spent.values())
    stall = chance.uniform(0, 0.08)
    if cause == "waiting":
        lost, stall = 0.6 * trained, 0.6
    figures = RunOutcome(
        rows_per_s_whole=104_000.0,
        stall_whole=stall,
        first_batch_s=spent["start"],
        evaluation_s=spent["evaluation"],
        seconds=total,
        huge_row_group=chance.choice([0, 1_048_576]),
        ended=True,
    )
    return figures, lost


@pytest.mark.parametrize("cause", ["start", "evaluation", "waiting", ""])
@pytest.mark.parametrize("seed", range(8))
def test_the_largest_loss_is_named_with_its_size(cause, seed):
    figures, lost = drawn(random.Random(seed), cause)
    text = figures.headline
    assert text.startswith("104 k rows/s over the whole run")
    if cause:
        name, found_s = figures.largest_loss
        assert (name, round(found_s, 6)) == (cause, round(lost, 6))
    if cause in ("start", "evaluation"):
        assert f"{seconds(round(lost, 1))} of {seconds(round(figures.seconds, 1))}" in text
        assert "waiting" not in text
        assert ("1,048,576 rows" in text) == (cause == "start" and figures.huge_row_group > 0)
    else:
        assert "waiting for input" in text
        assert "largest loss" not in text
    assert ("evaluation" in text) == (cause == "evaluation")


def made_run(path, rates: list[float], **end: float) -> Run:
    """A run that was looked at once a second; `end` are the figures of its last event."""
    looks = [
        {"kind": "loader", "at": at + 1.0, "rows": 1, "rows_per_s": rate, "stall": float(not rate)}
        for at, rate in enumerate(rates)
    ]
    event = {"kind": "end", "at": len(rates) + 1.0, "rows_per_s": 1e5, "stall_fraction": 0.004}
    return written(path, *looks, {**event, **end}, config={"huge_row_group": 1_048_576})


@pytest.mark.parametrize(
    ("rates", "first_batch_s", "told"),
    [
        ([0.0] * 39 + [1e5] * 13, 39.0, "39 s of 52 s, because a row group has 1,048,576 rows"),
        ([0.0, 0.0, 1e5], 0.2, "0.4 % waiting"),
        ([1e5] * 20 + [0.5] * 12, 0.1, "0.4 % waiting"),
    ],
    ids=["slow first batch", "short run", "hardly any rows at the end"],
)
def test_every_account_of_a_run_begins_with_the_whole_run(tmp_path, rates, first_batch_s, told):
    run = made_run(tmp_path / "run", rates, first_batch_s=first_batch_s)
    story = Story.of(run)
    for text in (last_lines(story.summary)[0], story.explanation, story.verdict):
        assert text.startswith("100 k rows/s over the whole run")
        assert told in text
    html = page.write(run.path).read_text()
    assert "<strong>100 k rows/s over the whole run</strong>" in html


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_loader_warns_of_huge_row_groups_that_it_reads_whole(tmp_path, capsys, is_cut):
    rows = 500_001
    table = pa.table({"label": np.resize([0, 1], rows).astype("int8"), "x": np.arange(rows) / 7})
    path, pages = tmp_path / "clicks.parquet", 20_000 if is_cut else rows
    pq.write_table(
        table, path, rows, max_rows_per_page=pages, data_page_size=2**30, use_dictionary=False
    )
    with Loader(path, batch_size=4096) as loader:
        said = capsys.readouterr().err
        assert loader.huge_group == (0 if is_cut else rows)
    if is_cut:
        assert "row_group_size" not in said
    else:
        assert_names(said, path, "500,001 rows", "row_group_size=32_768")
    usual = RowsPlan(groups=((32_768,) * 99,), batch_size=8)
    assert not usual.huge_group
