"""`fit` learns what a spec's operators need, with one pass over the input for each level."""

from __future__ import annotations

from sluice.common.errors import InputError
from sluice.etl.apply.counts import RowCounts
from sluice.etl.jobs.engine import Engine, Learnt
from sluice.etl.table.fitted_state import FittedState


def fit(engine: Engine, before: FittedState | None = None) -> tuple[FittedState, RowCounts]:
    """Returns the state of every fitted operator, and the counts of good rows and of rejects by reason.

    Takes a pass for each level. Values in `before` keep their ids, and new values follow."""
    spec, counted = engine.spec, None
    tables: dict[str, Learnt] = {}
    for level in range(max(1, spec.levels)):
        wanted = {
            number: learned for number, learned in enumerate(spec.fitted) if learned.level == level
        }
        sums = engine.sums(level, FittedState(spec=spec.fitted_hash, tables=tables), wanted)
        for number, learned in wanted.items():
            new = sums.stored.get(number)
            if new is None:
                new = learned.op.learn(sums.of(number))
            if before is not None and learned.key in before.tables:
                new = engine.extend(level, number, learned.op, before.kept(learned.key), new)
            tables[learned.key] = new
        counted = counted or sums.counted
    assert counted is not None
    return FittedState(
        spec=spec.fitted_hash, tables=tables, chains=spec.chains, fitted_on=spec.table.training
    ), counted


def too_many_values(names: str, max_values: int) -> InputError:
    return InputError(
        f"{names}: its columns have more than {max_values:,} values to keep in all; give the "
        "largest columns a min_count or max_size, or hash them"
    )
