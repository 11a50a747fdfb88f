"""The rivals are found by their names wherever the product's policies are, and keep what every policy keeps."""

import pytest

from sluice.agent import policies
from sluice.agent.policies import PRODUCT, RIVALS, make
from tests.agent.policy_contract import PolicyContract
from tests.product import KnobError
from tests.raises import raises
from tests.run_program import last_json, run_program

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", RIVALS)
class TestEachOfTheRivals(PolicyContract):
    """What holds of every policy."""


def test_the_folder_registers_the_names_that_the_product_says_lie_there():
    assert policies.names() == [*PRODUCT, *RIVALS]
    with raises(KnobError, "'plumer'", "'plumber'"):
        make("plumer")


def test_a_program_finds_them_from_anywhere(tmp_path, repo):
    """Only `sluice` is on its path, and a folder of the user's own that is called `benchmarks` is left alone."""
    (tmp_path / "benchmarks" / "rivals").mkdir(parents=True)
    (tmp_path / "benchmarks" / "rivals" / "__init__.py").write_text(
        "raise SystemExit('imported')\n"
    )
    done = run_program(
        "-m",
        "sluice.agent.lab.simulate",
        "--policy",
        "cores",
        "--scenario",
        "steady",
        cwd=tmp_path,
        check=True,
        env={"PYTHONPATH": str(repo)},
    )
    assert last_json(done)["policy"] == "cores"
    assert "one a core" in done.stderr
