"""`KeyTrace`: what a table holds of one value, such as a user who asks to be forgotten."""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sluice.common.errors import UsageError
from sluice.common.suggest import nearest
from sluice.etl.apply.cells import TextCells
from sluice.etl.apply.features import Features, typed
from sluice.etl.apply.lookups import keys_of_tail
from sluice.etl.ops.base import BETWEEN, FIRST, Fitted, as_text
from sluice.etl.ops.chain import ELEMENTS
from sluice.etl.ops.ids import Categorify
from sluice.etl.spec.nested_columns import is_list
from sluice.etl.spec.spec import Spec
from sluice.etl.table.fitted_state import FORGOTTEN, FittedState


@dataclass(frozen=True, kw_only=True)
class KeyTrace:
    """What one job made of a key, which is one value of an input column."""

    column: str
    value: pa.Scalar
    marks: Mapping[str, pa.Scalar]
    """The columns of the files that show which rows are the key's, with what they hold for it."""
    are_shared: bool
    """Whether rows of other values may hold the same in `marks`."""
    learned: Mapping[str, pa.Array]
    """For each fitted state, the names under which it has the key."""
    ids: Mapping[str, int]
    """For each column, the row of its embedding that is the key's, or that a hash gives it. A row for all values
    outside of the vocabulary is not the key's."""
    others: frozenset[str]
    """The other columns of the spec in which the key may stand, because they show other rows or share a vocabulary."""

    @classmethod
    def of(cls, spec: Spec, state: FittedState, column: str, text: str) -> KeyTrace:
        """Returns what a spec and a state make of a key. Rows of several jobs may have several states: a value may have
        had no id of its own at first."""
        one = _read_key(spec, column, text)
        features = Features(spec, state, ahead=False)
        marks, own = dict[str, pa.Scalar](), dict[str, pa.Scalar]()
        learned, ids = dict[str, pa.Array](), dict[str, int]()
        seen = {each.name for each in spec.rows.histories if each.of == column}
        part = rf"(^.?|{BETWEEN}){re.escape(as_text(one)[0].as_py())}({BETWEEN}|$)"
        for made in (*spec.columns, *spec.hidden):
            if column not in made.sources:
                continue
            run = functools.partial(features.run, made, columns={column: one}, extras={})
            is_own = made.sources == (column,)
            for name, op, number in made.fitted:
                if op.takes[0] != "text":
                    continue
                values = run(made.ops[:number]) if is_own else state[name]["value"]
                if [each.name for each in made.ops[:number]] == ["concat"]:
                    found = values.filter(pc.match_substring_regex(values, part))
                elif is_own and not is_list(values.type):
                    found = op.names_of(as_text(values))
                else:  # elements, or what a function makes of several columns
                    seen.add(made.name)
                    continue
                learned[name] = pa.array([*learned.get(name, ()), *found], pa.string())
            if not is_own:
                continue
            is_id = made.role == "sparse"
            if made in spec.hidden or not (is_id or made.raw or made.role == "key"):
                continue
            marks[made.name] = typed(run(made.left_to_spark), made)[0]
            buckets = [op.oov for op in made.ops if hasattr(op, "oov")]
            number = run(made.ops)[0].as_py()
            if is_id and (not buckets or number >= FIRST + buckets[-1]):
                ids[made.name] = number
            # Operators before a vocabulary could make one text of several.
            before = made.left_to_spark[:-1] if buckets and made.name in ids else made.left_to_spark
            if not before:
                own[made.name] = marks[made.name]
        if not marks:
            raise UsageError(
                f"--key {column}=…: no column of the table is made of {column!r} alone, so its rows cannot be found; "
                f'make the table anew with {{from = "{column}", role = "key"}}, read as text'
            )
        seen |= {
            made.name
            for made in spec.columns
            if column not in made.sources and any(name in learned for name, _, _ in made.fitted)
        }
        return cls(
            column=column,
            value=one[0],
            marks=own or marks,
            are_shared=not own,
            learned=learned,
            ids=ids,
            others=frozenset(seen),
        )

    def remove_rows(self, rows: pa.Table) -> pa.Table:
        """Returns the rows of others."""
        same = (pc.equal(rows[name], value) for name, value in self.marks.items())
        return _without(rows, functools.reduce(pc.and_, same))

    def remove_tail(self, tail: pa.Table, keys: Sequence[str]) -> pa.Table:
        """Returns what a server knows of other rows, by `keys`, without those of the key."""
        held = keys_of_tail(tail)
        if pa.types.is_struct(held.type):
            held = held.field(keys.index(self.column))
        return _without(tail, pc.equal(held, self.value.cast(held.type)))

    def clear(self, name: str, op: Fitted, table: pa.Table) -> tuple[pa.Table, int]:
        """Returns what an operator learned, with texts that no value has in place of the key, and how often. So all
        ids stay. A vocabulary loses the count, too. In a statistic the count stays, because those of other values
        depend on the sum."""
        found = pc.is_in(table["value"], self.learned[name])
        rows = pa.array(range(len(table))).cast(pa.string())
        cleared: dict[str, pa.Array | pa.Scalar] = {
            "value": pc.binary_join_element_wise(FORGOTTEN + uuid.uuid4().hex, rows, "")
        }
        cleared |= {"count": pa.scalar(0)} if isinstance(op, Categorify) else {}
        for column, value in cleared.items():
            at = table.schema.get_field_index(column)
            table = table.set_column(
                at, table.schema.field(at), pc.if_else(found, value, table[column])
            )
        return table, pc.sum(found).as_py() or 0


def _read_key(spec: Spec, column: str, text: str) -> pa.Array:
    if spec.kinds.get(column) in (None, *ELEMENTS) or column not in spec.input.columns:
        raise UsageError(
            f"--key {column}=…: the table's spec has no input column of this name with one value in each row"
            f"{nearest(column, spec.input.columns)}"
        )
    values, wrong = TextCells(spec.input).column(column, pa.array([text]))
    if wrong:
        raise UsageError(
            f"--key {column}={text!r}: is no {spec.input.columns[column]}, as this column is"
        )
    return values


def _without(rows: pa.Table, found: pa.Array) -> pa.Table:
    return rows.filter(pc.invert(pc.fill_null(found, False)))
