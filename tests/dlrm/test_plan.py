"""`sluice plan`, and the machines it reads."""

import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from sluice.dlrm.options import TABLE_DTYPES
from sluice.dlrm.plan import main
from sluice.dlrm.sharding.machine import MachineError, read
from sluice.dlrm.sharding.shard_sizes import DTYPES
from tests.dlrm.hostile_table import ended
from tests.product import ConfigError, Field, ModelConfig, TrainingMachine, tables_of
from tests.raises import assert_names, raises

pytestmark = pytest.mark.slow


def plan(*args):
    """Its exit status, what its last line has, and what people see."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = ended(main, *args)
    lines = out.getvalue().strip().splitlines()
    return code, json.loads(lines[-1]) if lines else None, err.getvalue()


TABLES = ["--width", "64", "--dtype", "fp16", "--machine"]
LARGE = ("--rows", "1825000000,1825000000", *TABLES)


def test_large_tables_fit_eight_ranks_by_rows():
    code, last, text = plan(*LARGE, "8x80GB")
    assert code == 0
    assert last["fits"]
    assert (last["weights_bytes"], last["state_bytes"]) == (467_200_000_000, 14_600_000_000)
    assert [table["kind"] for table in last["plan"]] == ["row", "row"]
    assert last["bytes_per_rank"] == [60_225_000_000] * 8
    assert {way: v["fits"] for way, v in last["ways"].items()} == {
        "auto": True,
        "row": True,
        "table": False,
        "column": False,
    }
    assert "467.2 GB" in text
    assert "14.6 GB" in text


def test_a_plan_that_does_not_fit_is_refused_with_the_missing_bytes():
    code, last, text = plan(*LARGE, "4x80GB")
    assert code == 2
    assert not last["fits"]
    assert last["missing_bytes"] == 481_800_000_000 - 4 * 68_000_000_000
    assert "209.8 GB missing" in text.splitlines()[-1]


def test_a_table_of_more_rows_than_ids_can_name_is_refused_as_in_training():
    code, last, text = plan("--rows", "10,5000000000", *TABLES, "8x80GB")
    assert (code, last) == (2, None)
    assert_names(text.splitlines()[-1], "'t1'", "5,000,000,000 rows", "32 bits")
    large = Field(name="user", role="sparse", type="int64", cardinality=2**32)
    with raises(ConfigError, "'user'", "4,294,967,296"):
        tables_of([large], ModelConfig())
    assert sorted(DTYPES) == sorted(TABLE_DTYPES)


def test_wrong_numbers_are_named():
    lookups = plan(*["--rows", "10,20,30", "--lookups", "1,2"])[2]
    assert_names(lookups, "--lookups", "2 numbers", "3 tables")
    assert_names(plan("--rows", "ten")[2], "--rows", "'ten'")


@pytest.mark.parametrize(
    ("module", "slow"), [("plan", "torch"), ("telemetry.tensorboard", "boto3")]
)
def test_what_takes_long_to_import_is_left_out(repo, module, slow):
    code = f"import sys, sluice.dlrm.{module}; sys.exit({slow!r} in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", code], cwd=repo, check=False).returncode


def test_a_machine_is_its_ranks_and_their_memory():
    assert read("8x80GB") == TrainingMachine(ranks=8, memory_bytes=80_000_000_000)
    assert read("16x24GiB").memory_bytes == 24 * 2**30
    for text in ("big", "8x80XB", "0x80GB"):
        with raises(MachineError, "machine"):
            read(text)


def test_criteo_1tb_on_64_ranks_is_planned_by_the_command_of_the_launch_page(repo):
    page = (repo / "docs" / "launch.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^sluice plan .*$", page, re.M)
    code, last, _ = plan(*shlex.split(line)[2:])
    assert code == 0
    ids = sum(table["rows"] for table in last["plan"])
    assert (len(last["plan"]), ids) == (26, 882_774_559)
    each = last["each_rank"]
    assert each["holds_bytes"] == max(last["bytes_per_rank"])
    fair = ids * (128 * 4 + 4) / 64
    assert fair <= each["holds_bytes"] < 1.1 * fair
    assert each["reads_a_step"]["rows"] == 65_536 // 64
    assert each["steps"] == -(-4_195_197_692 // 65_536)
    # All 26 vectors of a sample, forwards and backwards, if each were sent once.
    assert each["sends_a_step"] > 2 * 26 * 128 * 4 * 65_536 / 64 * 63 / 64
    assert f"{each['holds_bytes'] / 1e9:.2f} GB" in page
    assert f"{each['sends_a_step'] / 1e9:.2f} GB" in page
