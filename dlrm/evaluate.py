"""Evaluates a run's newest checkpoint over a whole split of a feature table: exact AUC, NE, logloss, calibration.

    sluice evaluate --run-dir DIR --data TABLE
    torchrun --nproc-per-node=2 -m sluice.dlrm.evaluate --run-dir DIR --data TABLE

The table may be another version than the run was trained on, as long as its columns and vocabulary are the same. The
last line of standard output is one JSON object: auc, ne, logloss, calibration, rows, and what was evaluated.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from sluice.common.errors import UsageError
from sluice.common.program import run, say
from sluice.common.settings import parse
from sluice.dlrm.evaluation.request import EvaluationRequest
from sluice.dlrm.liveness.rank_exit import RankExit, end_with_torchrun, tell_torchrun


def main(argv: list[str]) -> dict[str, Any] | None:
    request = parse(EvaluationRequest, argv, "sluice evaluate", description=__doc__)
    end_with_torchrun(RankExit(first=os.environ.get("RANK", "0") == "0"))
    try:
        return request.answer(say)
    except UsageError as error:
        tell_torchrun(str(error))
        raise


def program() -> NoReturn:
    """The whole program, as its command runs it."""
    run(main, at_once=True)  # as dlrm.train


if __name__ == "__main__":
    program()
