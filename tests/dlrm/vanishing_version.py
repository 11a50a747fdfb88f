"""The trainer as a user has it, but each version up to LAST is gone when the first rank pins it.

    python -m tests.dlrm.vanishing_version TABLE LAST WORDS…

A writer publishes the next version, and a vacuum removes the one before."""

import sys
import time

from benchmarks.small_table import small_table
from tests.product import PinKeeper, TableStore, program, vacuum


def main() -> None:
    table, last = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    moving = PinKeeper.moving

    def too_late(self, uri, version):
        if version < last:
            small_table(
                table, rows=800, files=1, values=50, mode="overwrite", first=800 * (version + 1)
            )
            vacuum(TableStore(table), keep=1, now=time.time() + 1, grace_s=0)
        return moving(self, uri, version)

    PinKeeper.moving = too_late
    program()


if __name__ == "__main__":
    main()
