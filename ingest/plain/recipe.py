"""How one column of a batch is made from columns of plain Parquet: `Recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sluice.etl import ops
from sluice.etl.ops.base import as_one_column, id_kind
from sluice.etl.ops.chain import make_labels
from sluice.etl.ops.hashing import MOST_TEXT_BYTES, rows_of_long_texts
from sluice.etl.ops.ids import Hash
from sluice.etl.schema import Field
from sluice.etl.spec.input_values import ARROW_TYPES, converted
from sluice.ingest.columns import ColumnError
from sluice.ingest.plain.hashed_ids import can_hash, hashed_ids
from sluice.ingest.stages.number_types import to_batch_type

_DICTIONARIES = tuple(
    f"dictionary<values={kind}" for kind in ("int", "uint", "float", "double", "halffloat")
)


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

    @classmethod
    def stored(
        cls,
        name: str,
        role: str,
        kind: str,
        size: int | None = None,
        operators: tuple[ops.Operator, ...] = (),
    ) -> Recipe:
        """Makes a recipe for one stored column, hashed to `size` ids or changed by `operators`. `kind` is the name of
        its Arrow type."""
        if size is not None:
            return cls(name=name, role=role, sources=(name,), operators=(Hash(size=size),))
        numbers = kind.startswith("decimal") or kind.startswith(_DICTIONARIES)
        return cls(
            name=name,
            role=role,
            sources=(name,),
            kinds=("float",) if numbers else (),
            operators=operators,
        )

    @property
    def is_unchanged(self) -> bool:
        """Whether the column is read unchanged, under its own name."""
        return not self.kinds and not self.operators and "." not in self.name

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
        return sizes[-1] if sizes else None

    def type(self, stored: Sequence[pa.DataType]) -> pa.DataType:
        """Returns the type of its values if its sources have these types."""
        if self.operators:
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


class Making:
    """Applies a recipe to pieces of columns."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        online = tuple(
            {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in op.described.items()
            }
            for op in recipe.operators
        )
        field = Field(
            name=recipe.name,
            role=recipe.role,
            type="",
            online=online,
            nullable=True,
            cardinality=recipe.size,
        )
        self._operators = ops.online(field, None) if online else None
        only = recipe.operators[0] if len(recipe.operators) == 1 else None
        self._hash = only if isinstance(only, Hash) and not only.salt else None

    def __call__(self, arrays: Sequence[pa.Array]) -> pa.Array:
        """Makes the values of one piece. `arrays` has one array for each source."""
        recipe = self._recipe
        if recipe.operators and any(len(rows_of_long_texts(array)) for array in arrays):
            raise ColumnError(
                f"column {recipe.name!r} has a text of more than {MOST_TEXT_BYTES:,} bytes. Shorten it in the data, or "
                "leave out its row with on_error='quarantine'"
            )
        if (
            self._hash is not None
            and can_hash(str(arrays[0].type))
            and set(recipe.kinds) <= {"int", "text", "texts"}
        ):
            return hashed_ids(arrays[0], self._hash).cast(recipe.type(()))
        columns = []
        for name, array, kind in zip(
            recipe.sources, arrays, recipe.kinds or [""] * len(arrays), strict=True
        ):
            is_dictionary = pa.types.is_dictionary(array.type)
            if is_dictionary and not kind:
                array = array.dictionary_decode()  # noqa: PLW2901
            elif kind and not (
                is_dictionary
                and kind == "text"
                and array.type.value_type == pa.string()
                and len(arrays) == 1
                and self._operators is not None
            ):  # each distinct text of a dictionary is processed once
                array = typed(name, array, kind)  # noqa: PLW2901
            columns.append(array)
        if self._operators is None:
            if recipe.role == "label" and recipe.kinds == ("int",):
                wrong = pc.filter(
                    columns[0], pc.invert(pc.is_in(columns[0], pa.array([0, 1, None])))
                )
                if len(wrong):
                    raise ColumnError(
                        f"column {recipe.sources[0]!r} holds {wrong[0]}, and a label is 0 or 1"
                    )
            return columns[0]
        values = as_one_column(columns, recipe.sources)
        if recipe.role == "label":
            return make_labels(recipe.operators, values).cast(recipe.type([values.type]))
        made = to_batch_type(self._operators(values))
        return made if isinstance(made, pa.Array) else pa.array(made)


def check_kind(name: str, have: pa.DataType, kind: str) -> None:
    """Raises ColumnError if a column of type `have` cannot be read as the spec's type `kind`."""
    try:
        converted(pa.array([], have), kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ColumnError(
            f"column {name!r} holds {have}, which is not read as {kind}: give it another type in "
            "input.columns of the spec, or leave it out"
        ) from None


def typed(name: str, array: pa.Array, kind: str) -> pa.Array:
    """Converts a column to the spec's type. Raises ColumnError if a value does not fit."""
    values, lost = converted(array, kind)
    if lost is not None and lost.any():
        raise ColumnError(
            f"column {name!r} holds {array[int(lost.argmax())]}, which is no whole number of 64 bits: "
            "read it as float in input.columns of the spec"
        )
    return values
