"""Makes a loader's columns from stored ones, where a row group is decoded: `MadeColumns`. It also holds the selection
of rows.

This is the cheapest place. There, a number still has 64 bits, and a text that is stored once is processed once. Rows
that wait for the shuffle take four bytes a value and hold no texts.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from sluice.etl.spec.input_section import ARROW_TYPES
from sluice.etl.spec.nested_columns import join_chunks
from sluice.etl.spec.spec import Spec
from sluice.ingest.columns import ColumnError
from sluice.ingest.plain.recipe import Recipe
from sluice.ingest.plain.row_selection import RowSelection

# Texts with at most this many stored bytes a value, and a dictionary page of usual size, are read as a dictionary.
_FEW_BYTES = 4
_DICTIONARY_BYTES = 2**20


class MadeColumns:
    """Makes columns by recipes, for the selected rows."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        selection: RowSelection | None = None,
        spec: Spec | None = None,
        bags: Mapping[str, float] = MappingProxyType({}),
    ):
        """`spec` defines the types of stored columns, and which columns a file may lack. `bags` has the average number
        of ids that operators make for a column of bags."""
        self._recipes, self._bags, self.selection = tuple(recipes), bags, selection
        """The selected rows. None: all."""
        kinds: Mapping[str, str] = spec.input.columns if spec else {}
        self.typed: Mapping[str, pa.DataType] = {
            name: ARROW_TYPES[kind] for name, kind in kinds.items()
        }
        """The types in which columns are read, whatever type a file has."""
        self.optional: frozenset[str] = frozenset(spec.input.optional) if spec else frozenset()
        """The columns that a file may lack."""
        self._unlabelled = bool(spec and spec.table.unlabelled)

    @classmethod
    def of(
        cls, recipes: Sequence[Recipe], names: Container[str], **given: Any
    ) -> MadeColumns | None:
        """Returns what makes the columns in `names`. None: all of them are loaded as they are stored. `given` is as for
        `__init__`."""
        made = cls([recipe for recipe in recipes if recipe.name in names], **given)
        is_needed = made.selection or not all(recipe.is_unchanged for recipe in made._recipes)
        return made if is_needed else None

    def split(self, given: Collection[str]) -> tuple[MadeColumns, MadeColumns]:
        """Returns what makes the columns without a source among `given`, and what makes the other ones."""
        parts = copy(self), copy(self)
        for part, has_given in zip(parts, (False, True), strict=True):
            part._recipes = tuple(
                recipe
                for recipe in self._recipes
                if has_given != set(recipe.sources).isdisjoint(given)
            )
        return parts

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns that the recipes use."""
        return tuple(dict.fromkeys(name for recipe in self._recipes for name in recipe.sources))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(recipe.name for recipe in self._recipes)

    @property
    def more_bytes(self) -> int:
        """How many more bytes a row of the made columns may take than a row of the stored ones."""
        return 4 * max(0, len(self._recipes) - len(self.sources))

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of the columns that are not loaded as they are stored."""
        changed = [recipe.name for recipe in self._recipes if not recipe.is_unchanged]
        return round(sum(4 + 4 * self._bags.get(name, 0.0) for name in changed))

    def schema(self, stored: pa.Schema) -> pa.Schema:
        """Returns the schema of `table`'s result for a stored table of this schema."""
        return pa.schema(
            [
                pa.field(
                    recipe.name, recipe.type([stored.field(name).type for name in recipe.sources])
                )
                for recipe in self._recipes
            ]
        )

    def dictionary_columns(self, stored: pa.Schema, footer: Any) -> list[str]:
        """Returns the columns to read as dictionaries, by the footer of a file: texts that repeat, so that each
        distinct text is processed once."""
        if not footer.num_row_groups:
            return []
        made = {name for recipe in self._recipes if recipe.computes for name in recipe.sources}
        group = footer.row_group(0)
        chunks = {
            chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))
        }
        return [
            f.name
            for f in stored
            if f.name in made
            and f.name in chunks
            and (pa.types.is_string(f.type) or pa.types.is_binary(f.type))
            and chunks[f.name].total_uncompressed_size
            <= _FEW_BYTES * chunks[f.name].num_values
            + _DICTIONARY_BYTES * chunks[f.name].has_dictionary_page
        ]

    def table(self, stored: pa.Table) -> pa.Table:
        """Makes the columns from a row group. Raises ColumnError if a value cannot be used."""
        made = {}
        for recipe in self._recipes:
            columns = [stored.column(name) for name in recipe.sources]
            pieces = (
                [(chunk,) for chunk in columns[0].chunks]
                if len(columns) == 1
                else [tuple(join_chunks(column) for column in columns)]
            )
            try:
                made[recipe.name] = pa.chunked_array(
                    [recipe.make(piece) for piece in pieces],
                    recipe.type([column.type for column in columns]),
                )
            except Exception as error:
                why = f"column {recipe.name!r}: {error}"
                raise ColumnError(str(error) if isinstance(error, ColumnError) else why) from error
            # Rows without a label get 0, as in a feature table.
            if recipe.role == "label" and self._unlabelled:
                made[recipe.name] = made[recipe.name].fill_null(0)
        return pa.table(made)
