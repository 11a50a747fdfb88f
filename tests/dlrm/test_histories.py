"""A model that reads histories learns from a plain table what no column of a row says: made sessions, in which a user
clicks on what the last events had."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.product import Config, ConfigError, Field, ModelConfig, auc
from tests.raises import assert_names, raises
from tests.run_program import last_json

USERS, EVENTS, ITEMS, LAST = 400, 50, 12, 2
SPEC = """
[input]
format = "parquet"
columns = ["user:int", "time:int", "item:int", "clicked:int"]
[table]
split = {train = 0.8, test = 0.2}
split_by = ["user"]
[[column]]
name = "clicked"
role = "label"
[[column]]
name = "item"
role = "sparse"
ops = [{op = "hash", size = 100}]
"""


def sessions(path: Path) -> float:
    """Writes the events of users, and returns the AUC of the true chance of a click: 0.9 for an item of one of the
    last two events, 0.1 for others. Half of the items are drawn from these events."""
    draw = np.random.default_rng(1)
    items = draw.integers(0, ITEMS, (USERS, EVENTS))
    back = draw.integers(1, LAST + 1, items.shape)
    for time in np.flatnonzero(draw.random(EVENTS) < 0.5):
        items[:, time] = items[np.arange(USERS), np.maximum(0, time - back[:, time])]
    known = np.zeros(items.shape, bool)
    for ago in range(1, LAST + 1):
        known[:, ago:] |= items[:, ago:] == items[:, :-ago]
    chances = np.where(known, 0.9, 0.1)
    clicked = draw.random(items.shape) < chances
    user, time = np.indices(items.shape)
    columns = {"user": user, "time": time, "item": items, "clicked": clicked.astype(int)}
    rows = pa.table({name: values.ravel() for name, values in columns.items()})
    pq.write_table(rows, path, row_group_size=2000)
    return auc(chances.ravel(), clicked.ravel(), np.ones(clicked.size))


@pytest.mark.slow
def test_dien_comes_near_the_best_auc_of_sessions_whose_histories_the_loader_makes(tmp_path, forks):
    best = sessions(tmp_path / "events.parquet")
    (tmp_path / "spec.toml").write_text(SPEC)
    of_run = f"--data {tmp_path}/events.parquet --spec {tmp_path}/spec.toml".split()
    history = ("--history", f"by=user,time=time,columns=item,last={LAST}")
    small = ["--width", "8", "--over-layers", "16", "--batch-size", "64", "--dense-lr", "0.01"]
    process = forks.train(
        *("--run-dir", tmp_path / "run", *of_run, "--model", "dien", *history, *small),
        *["--epochs", "2", "--lr", "0.2"],
        tmp=tmp_path,
    )
    assert last_json(process)["auc"] > best - 0.02
    judged = forks.run("dlrm.evaluate", "--run-dir", tmp_path / "run", tmp=tmp_path)
    assert last_json(judged)["auc"] == pytest.approx(last_json(process)["auc"], abs=1e-6)
    served = forks.run("dlrm.serve", tmp_path / "run", "--port", 0, tmp=tmp_path, code=2)
    assert_names(served.stderr, "--history by=user", "[[history]]")


def test_a_history_that_cannot_be_is_refused(tmp_path):
    for text in ("by=user,columns=item", "by=u,time=t,columns=item,last=many"):
        with raises(ConfigError, text, "by=USER,time=TIME,columns=ITEM"):
            ModelConfig(kind="dien", history=text)
    model = ModelConfig(kind="dien", history="by=user,time=time,columns=item")
    fields = (
        Field(name="item", role="sparse", type="int32"),
        Field(name="itm2", role="dense", type="float"),
    )
    wrong = Config(data="t", version=0, model=replace(model, history="by=u,time=t,columns=itm"))
    with raises(ConfigError, "'itm'", "'item'"):
        wrong.changed_table(SimpleNamespace(fields=fields))
    with raises(ConfigError, "--follow", "--history"):
        Config(data="t", version=0, follow="epochs", model=model)
