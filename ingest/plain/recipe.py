"""How one column of a batch is made from stored columns: `Recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl import ops
from sluice.etl.apply.cells import WRONG, stored_column
from sluice.etl.ops.base import as_one_column, id_kind, on_distinct, plain
from sluice.etl.ops.chain import applied, make_labels
from sluice.etl.ops.hashing import MOST_TEXT_BYTES, rows_of_long_texts
from sluice.etl.ops.ids import Hash
from sluice.etl.schema import Field
from sluice.etl.spec.input_section import ARROW_TYPES
from sluice.etl.spec.nested_columns import is_list, is_text
from sluice.ingest.columns import ColumnError
from sluice.ingest.flow.number_types import to_batch_type


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One column: its sources and the operators that make it. The operators are the ETL's."""

    name: str
    role: str
    sources: tuple[str, ...]
    """The columns of the files. A part of a struct has a dotted name."""
    kinds: tuple[str, ...] = ()
    """The type of each source in a spec (`int`, `float`, `text`, `texts`, `floats`). Empty: the stored type."""
    operators: tuple[ops.Operator, ...] = ()
    """Empty: the values stay unchanged."""
    online: ops.Online | None = None
    """What a feature table leaves to its readers, instead of `operators`."""
    online_ids: int | None = None
    """The number of embedding rows for the ids that `online` gives."""

    @classmethod
    def of_field(cls, field: Field, state: Any) -> Recipe:
        """Makes the recipe for a column of a feature table, whose fitted state is `state`."""
        online = ops.online(field, state) if field.online else None
        return cls(
            name=field.name,
            role=field.role,
            sources=(field.name,),
            online=online,
            online_ids=field.cardinality,
        )

    @classmethod
    def stored(
        cls,
        name: str,
        role: str,
        kind: pa.DataType,
        size: int | None = None,
        operators: tuple[ops.Operator, ...] = (),
    ) -> Recipe:
        """Makes a recipe for one stored column of this `kind`, hashed to `size` ids or changed by `operators`."""
        if size is not None:
            return cls(name=name, role=role, sources=(name,), operators=(Hash(size=size),))
        t = pa.types
        numbers = t.is_decimal(kind) or (t.is_dictionary(kind) and is_number(kind.value_type))
        return cls(
            name=name,
            role=role,
            sources=(name,),
            kinds=("float",) if numbers else (),
            operators=operators,
        )

    @property
    def computes(self) -> bool:
        """Whether operators make the column."""
        return bool(self.operators or self.online)

    @property
    def is_unchanged(self) -> bool:
        """Whether the column is read unchanged, under its own name."""
        return not self.kinds and not self.computes and "." not in self.name

    @property
    def described(self) -> list[Any]:
        """Everything that its values depend on, for hashes and comparisons."""
        return [
            self.name,
            list(self.sources),
            list(self.kinds),
            [op.described for op in self.operators],
        ]

    @property
    def size(self) -> int | None:
        """The number of embedding rows for its ids, if operators make them."""
        sizes = [op.cardinality(None) for op in self.operators if op.gives == "id"]
        return sizes[-1] if sizes else self.online_ids

    def type(self, stored: Sequence[pa.DataType]) -> pa.DataType:
        """Returns the type of its values if its sources have these types."""
        if self.computes:
            ids = pa.from_numpy_dtype(id_kind(self.size))
            return {"sparse": ids, "id_list": pa.list_(ids)}.get(self.role, pa.float32())
        if self.kinds:
            return ARROW_TYPES[self.kinds[0]]
        return stored[0].value_type if pa.types.is_dictionary(stored[0]) else stored[0]

    def field(self, stored: Sequence[pa.DataType]) -> Field:
        """Returns the column's field in the loader's schema."""
        kind = self.type(stored)
        if self.role != "id_list":
            layout = "scalar"
        elif pa.types.is_binary(kind):
            layout = "bytes"
        else:
            layout = "list"
        return Field(
            name=self.name,
            role=self.role,
            type=str(kind).replace("<item:", "<element:"),
            layout=layout,
            cardinality=self.size,
            inputs=() if self.sources == (self.name,) else self.sources,
        )

    def check(self, stored: Sequence[pa.DataType]) -> None:
        """Raises ColumnError if sources of these types cannot be used."""
        for name, have, kind in zip(self.sources, stored, self.kinds, strict=False):
            check_kind(name, have, kind)

    def make(self, arrays: Sequence[pa.Array]) -> pa.Array:
        """Makes the values of one piece of the columns. `arrays` has one array for each source."""
        if self.computes and any(len(rows_of_long_texts(array)) for array in arrays):
            raise ColumnError(
                f"column {self.name!r} has a text of more than {MOST_TEXT_BYTES:,} bytes. Shorten it in the data, or "
                "leave out its row with on_error='quarantine'"
            )
        if self.online is not None:
            return pa.array(to_batch_type(self.online(arrays[0])))
        columns = []
        for name, array, kind in zip(
            self.sources, arrays, self.kinds or [""] * len(arrays), strict=True
        ):
            is_dictionary = pa.types.is_dictionary(array.type)
            inner = getattr(array.type, "value_type", array.type)
            # Operators take each distinct text of a dictionary once, and some take digits without texts.
            is_kept = self.operators and (
                (is_dictionary and is_text(inner))
                or (self.operators[0].takes_stored and pa.types.is_integer(inner))
            )
            if kind and not (kind in ("text", "texts") and is_kept and len(arrays) == 1):
                columns.append(typed(name, array, kind))
            elif not self.operators:
                columns.append(plain(array))
            else:
                columns.append(array.cast(pa.list_(inner)) if is_list(array.type) else array)
        if not self.operators:
            if self.role == "label" and self.kinds == ("int",):
                wrong = pc.filter(
                    columns[0], pc.invert(pc.is_in(columns[0], pa.array([0, 1, None])))
                )
                if len(wrong):
                    raise ColumnError(
                        f"column {self.sources[0]!r} holds {wrong[0]}, and a label is 0 or 1"
                    )
            return columns[0]
        values = as_one_column(columns, self.sources)
        if self.role == "label":
            return make_labels(self.operators, values).cast(self.type([values.type]))
        made = on_distinct(partial(applied, self.operators), values)
        if self.role in ("sparse", "id_list"):
            return made.cast(self.type(()))
        return pa.array(to_batch_type(np.asarray(made, np.float64)))


def is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind))


def check_kind(name: str, have: pa.DataType, kind: str) -> None:
    """Raises ColumnError if a column of type `have` cannot be read as the spec's type `kind`."""
    try:
        stored_column(pa.array([], have), kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ColumnError(
            f"column {name!r} holds {have}, which is not read as {kind}: give it another type in "
            "input.columns of the spec, or leave it out"
        ) from None


def typed(name: str, array: pa.Array, kind: str) -> pa.Array:
    """Converts a column to the spec's type. Raises ColumnError if a value does not fit."""
    values, lost = stored_column(array, kind)
    if lost is not None and lost.any():
        raise ColumnError(
            f"column {name!r} holds {array[int(lost.argmax())]}, which is {WRONG[kind]}: correct it, or give the "
            "column another type, such as float, in input.columns of the spec"
        )
    return values
