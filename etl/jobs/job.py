"""`Job`: one request, with all checks that need no engine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sluice.common.errors import InputError
from sluice.common.suggest import nearest
from sluice.etl.apply.learned_rows import why_labels_leak, why_not
from sluice.etl.ops.timestamps import ParseTime
from sluice.etl.spec.columns import ColumnSpec
from sluice.etl.spec.row_identity import Identity, SplitMoved
from sluice.etl.spec.row_rules import HistorySpec
from sluice.etl.spec.spec import Spec
from sluice.etl.table.commit import Base, new_job, stored_schema
from sluice.etl.table.fitted_state import FittedState, StateError
from sluice.etl.table.job_record import JobRecord
from sluice.etl.table.split_rows import under_rule
from sluice.etl.table.store import TableStore
from sluice.etl.table.table import FeatureTable, check_values
from sluice.etl.table.table_files import TableFiles, versioned

MAX_REJECTS = 0.01
Part = HistorySpec | ColumnSpec
WORKER_BYTES = 256 * 2**20
"""The default for `Job.worker_bytes`."""
_COLLECTED_BYTES = 128
"""The memory of one value on the driver, which sorts the values that it collects."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request. It is based on the version that the table has now, and a wrong request is refused at once."""

    spec: Spec
    inputs: tuple[str, ...]
    store: TableStore
    mode: str = "create"
    rejects: str | None = None
    """The folder for rejected rows. Default: next to the table."""
    max_rejects: float = MAX_REJECTS
    reuse_state: bool = False
    update_state: bool = False
    refit: bool = False
    """Whether an overwrite learns everything anew, and ignores the state of the version before."""
    worker_bytes: int = WORKER_BYTES
    """The bytes of fitted state that a Python worker may hold. Larger vocabularies stay in files."""
    split_moved: str = "refuse"
    """`refuse` or `accept` rows that change their split."""
    late: str = "accept"
    """`accept` or `reject` an append's rows that are older than rows of the table from which their histories
    continue."""
    accept_nulls: tuple[str, ...] = ()
    """Columns that may have many more nulls than in the version before."""
    name: str = field(default_factory=new_job)
    base: Base = field(init=False)
    parent: JobRecord | None = field(init=False)
    """The record of the version before."""
    before: FittedState | None = field(init=False, repr=False)
    """The fitted state of the version before, if this job applies it or adds to it."""
    rule_before: Identity | None = field(init=False, repr=False)
    """The rule of the version before, if this spec has its columns. Its rows can then be recognised."""

    def __post_init__(self) -> None:
        self._check_options()
        if self.spec.input.is_table:  # a commit meanwhile must not change what this job reads
            pinned = tuple(TableFiles.open(path).name for path in self.inputs)
            if len({*pinned}) < len(pinned):
                raise InputError(f"{', '.join(self.inputs)}: name each table once")
            object.__setattr__(self, "inputs", pinned)
        self.spec.import_functions()  # a function that may not run is refused before any work
        base = Base.read(self.store)
        base.permit(self.mode, self.store.uri)
        parent = None
        if base.version is not None:
            table = FeatureTable.open(self.store.uri, base.version)
            parent = table.record if table.records else None
        before = None
        if not self.refit and (self.reuse_state or self.update_state or self.mode == "append"):
            # An append that learned anew would give one id to two values.
            before = _load_state(
                self.spec,
                self.store,
                parent,
                partly=self.update_state and self.mode == "overwrite",
            )
        spec, rule_before = under_rule(self.spec, parent, accept=self.split_moved == "accept")
        if spec.table.layout is None:
            layout: Any = parent.layout if parent is not None and self.mode == "append" else "speed"
            spec = replace(spec, table=replace(spec.table, layout=layout))
        if before is not None and parent is not None:
            self._check_state(spec, parent, before)
        if base.version is not None and (self.mode == "append" or self.reuse_state):
            check_values(table, spec)
        if self.mode == "append":
            base.permit_append(
                stored_schema(spec.fields(learned=before.tables if before else {})),
                self.store.uri,
            )
            if parent is not None and parent.spec:
                self._check_columns(Spec.parse(parent.spec))
        for name, value in (
            ("base", base),
            ("parent", parent),
            ("before", before),
            ("spec", spec),
            ("rule_before", rule_before),
        ):
            object.__setattr__(self, name, value)
        self.store.probe()

    def _check_options(self) -> None:
        """Refuses options that do not fit each other or the spec."""
        if self.split_moved not in ("refuse", "accept"):
            raise SplitMoved(f"split_moved = {self.split_moved!r}: must be refuse or accept")
        if self.late not in ("accept", "reject"):
            raise InputError(f"late = {self.late!r}: must be accept or reject")
        rows = self.spec.rows
        made = {each.name for each in rows.histories}
        chained = next((h for h in rows.histories if made & {h.by, h.order}), None)
        if self.late == "reject" and chained:
            raise InputError(
                f"--late reject: {chained.name!r} goes by another history or lag, and which of its rows are late is "
                "known only after that; leave out --late"
            )
        for name in [rows.dedup and rows.dedup.order, *(each.order for each in rows.histories)]:
            if name and self.spec.kinds.get(name) == "text":
                raise InputError(
                    f"{self.spec.name}: rows cannot be ordered by the text {name!r}; read its times as numbers: "
                    f'{{name = "{name}:float", format = "%Y-%m-%d %H:%M:%S"}} in input.columns'
                )
        if self.mode == "append" and self.spec.input.place:
            raise InputError(
                f"{self.spec.name}: input.place is a row's place in the input of one job, so an append would "
                "give its rows places among the earlier ones; pass all of the input with --mode overwrite"
            )
        if self.refit and (self.mode != "overwrite" or self.reuse_state):
            raise StateError(
                "--refit learns everything anew and gives new ids; pass it with --mode overwrite and all of "
                "the input, without --reuse-state"
            )
        joins = self.spec.rows.joins
        names = {
            *self.spec.input.columns,
            *(column.name for column in self.spec.columns),
            *(name for join in joins for name in (*join.columns, join.their_time) if name),
        }
        for name in self.accept_nulls:
            if name not in names:
                raise InputError(f"--accept-nulls {name}: no such column{nearest(name, names)}")

    def _check_columns(self, before: Spec) -> None:
        """Refuses an append that makes a column, a history or a lag in another way than the table does."""
        spec = self.spec.named_as(before.input)
        kept_parts: tuple[Part, ...] = (*before.rows.histories, *before.columns)
        parts: tuple[Part, ...] = (*spec.rows.histories, *spec.columns)
        old = {(type(each), each.name): each for each in kept_parts}
        for each in parts:
            kept = old.get((type(each), each.name), each)
            for key in (part.name for part in fields(each)):
                wants, has = getattr(each, key), getattr(kept, key)
                if _made_by(wants) != _made_by(has):
                    raise InputError(
                        f"{self.spec.name}: {each.name!r} has {key} = {wants!r}, and {has!r} in the table, of which it "
                        f"would be a part; {self.advise_rebuild(self.spec)}"
                    )

    def _check_state(self, spec: Spec, parent: JobRecord, before: FittedState) -> None:
        """Refuses to build on the state of the version before if it does not fit, or if a row could meet its own
        label."""
        learned = f"{self.store.uri}: what version {parent.version} learned"
        moved = not spec.rule.is_same(parent.identity or spec.rule)
        if why := why_not(
            before, parent.spec, spec, mode=self.mode, update=self.update_state, rows_moved=moved
        ):
            raise StateError(f"{learned} cannot be built on: {why}")
        if why := why_labels_leak(before, parent, spec):
            raise StateError(
                f"{learned} from labels cannot be applied to these rows, because they could meet their own: "
                f"{why}; {self.advise_rebuild(spec)}"
            )

    def advise_rebuild(self, spec: Spec) -> str:
        """Returns the command that makes the table anew and keeps every id."""
        words = (
            "--spec",
            spec.name,
            "--output",
            self.store.uri,
            "--mode",
            "overwrite",
            "--update-state",
        )
        return f"make it anew from all of its input: sluice etl {shlex.join(words)} --input …"

    @property
    def collected_values(self) -> int:
        """The most values that Spark's driver collects, if some may stay in files instead."""
        return max(1, self.worker_bytes // _COLLECTED_BYTES)

    @property
    def learns(self) -> bool:
        """Whether operators are fitted. Otherwise the state of the version before is applied."""
        return self.before is None or self.update_state

    @property
    def input_versions(self) -> dict[str, int]:
        """The version of each Delta or Iceberg table that is read."""
        named = map(versioned, self.inputs) if self.spec.input.is_table else ()
        return {table: version for table, version in named if version is not None}

    @property
    def input_names(self) -> str:
        """The input, in messages."""
        return ", ".join(self.inputs)

    @property
    def files_of_state(self) -> str:
        """The folder of vocabularies that this job learns and that are too large to be collected. After a saved state
        names them, other versions may use them, so that only vacuum can remove them."""
        return f"_sluice/state/{self.name}"


def _load_state(
    spec: Spec, store: TableStore, parent: JobRecord | None, *, partly: bool = False
) -> FittedState:
    """Loads the table's fitted state, under the names of this spec. Raises StateError if it belongs to another spec.

    With `partly`, loads only what this spec learns in the same way. So columns may be added and dropped, and the others
    keep their ids. What was learned from labels is then left out. It gives no ids, and a row may have another fold
    now."""
    if not spec.fitted:
        return FittedState(spec=spec.fitted_hash)
    if parent is None or parent.state is None:
        raise StateError(f"{store.uri}: there is no fitted state to reuse; leave out --reuse-state")
    state = FittedState.load(store, parent.state)
    for stored in state.stored.values():
        stored.check()  # an engine may read the files by itself, without a check
    earlier = Spec.parse(parent.spec).input if parent.spec else spec.input
    chains = json.loads(json.dumps(spec.named_as(earlier).chains))  # in the form of a stored state
    kept = dict[str, str]()
    for key, chain in chains.items():
        column, _, number = key.rpartition("/")
        for name in (spec.input.name_before(earlier, column), column):
            if state.chains.get(f"{name}/{number}") == chain:
                kept.setdefault(key, f"{name}/{number}")
    if partly:
        kept = {key: old for key, old in kept.items() if key not in spec.learned_from_labels}
    elif kept.keys() != chains.keys() or {*kept.values()} != state.tables.keys():
        raise StateError(
            f"{store.uri}: its fitted state belongs to another spec: {_difference(state.chains, chains)}; "
            "to add or drop columns and keep every id, pass --mode overwrite --update-state with all of the "
            "input, old and new"
        )
    return FittedState(
        spec=spec.fitted_hash,
        tables={key: state.tables[old] for key, old in kept.items()},
        chains=spec.chains,
        fitted_on=state.fitted_on,
    )


def _made_by(setting: Any) -> Any:
    """Returns what a setting of a column decides. The formats in which texts are written do not count: another one may
    be added for new files, and read values stay the same."""
    if not isinstance(setting, tuple):
        return setting
    return [replace(part, format="%Y") if isinstance(part, ParseTime) else part for part in setting]


def _difference(have: Mapping[str, Any], want: Mapping[str, Any]) -> str:
    """Describes the first state that two specs learn differently."""
    for key in sorted(have.keys() | want.keys()):
        if key not in want or key not in have:
            return f"{key} is {'not in this spec' if key in have else 'only in this spec'}"
        if have[key] != want[key]:
            return (
                f"{key} was learned by {_words(have[key])}, and is {_words(want[key])} in this spec"
            )
    return "its columns differ"


def _words(users: Any) -> str:
    return "; ".join(f"{' × '.join(sources)}: {ops}" for sources, ops in users)
