"""The trainer, which kills itself around a validation.

    python -m tests.dlrm.killed_validation WHEN NUMBER WORDS…

WHEN is `measure` (the checkpoint is saved, and nothing is measured), `BEST` or `EVALUATED` (as that file is about to
appear), or `test` (all is done but the last evaluation). NUMBER counts these moments from 1."""

import os
import signal
import sys
from collections.abc import Callable
from itertools import count

from tests.product import Validator, program


def main() -> None:
    when, number = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    moments, measure = count(1), Validator.measure

    def reach(moment: str, prepare: Callable[[], None] = lambda: None) -> None:
        if moment == when and next(moments) == number:
            prepare()
            os.kill(os.getpid(), signal.SIGKILL)

    def measured(self, split, meta):
        reach("measure" if split == "validation" else split, self.checkpoints.wait)
        return measure(self, split, meta)

    def watch(event: str, arguments: tuple) -> None:
        if event == "os.rename":
            reach(os.path.basename(arguments[1]))

    Validator.measure = measured
    sys.addaudithook(watch)
    program()


if __name__ == "__main__":
    main()
