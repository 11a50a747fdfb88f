"""What a command line asks of Petastorm's Reader, by functions of the user's that make it: `PetastormRequest`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice.common.settings import setting
from sluice.etl.spec.permission import Permission, function_name
from sluice.ingest.read.petastorm import compat
from sluice.ingest.read.petastorm.options import PetastormError, PetastormOptions, reshaped

if TYPE_CHECKING:
    from sluice.etl.table.table import FeatureTable

_NAMES = {
    "transform_spec": "transform_spec",
    "predicate": "predicate",
    "rowgroup_selector": "rowgroup_selector",
    "rowgroup_cache": "cache",
}
"""An option, and what it is called in `PetastormOptions`."""
ON_EVERY_SPLIT = ("transform_spec",)
"""The options that also hold where a model is evaluated. The others choose the rows that are trained on."""


@dataclass(frozen=True, kw_only=True)
class PetastormRequest:
    """Each option names a function that is called without arguments, in each rank. A command line that names a function
    allows it."""

    title = "Petastorm's Reader"
    transform_spec: str = setting(
        "",
        "change each row group as a DataFrame, also where the model is evaluated: a "
        "function of yours that returns a TransformSpec",
        metavar="MODULE:FUNCTION",
        parse=function_name,
    )
    predicate: str = setting(
        "",
        "train only on the rows that it takes: a function of yours that returns a predicate",
        metavar="MODULE:FUNCTION",
        parse=function_name,
    )
    rowgroup_selector: str = setting(
        "",
        "train only on the row groups that it chooses: a function of yours that "
        "returns a selector without stored indexes",
        metavar="MODULE:FUNCTION",
        parse=function_name,
    )
    rowgroup_cache: str = setting(
        "",
        "keep the decoded row groups that are trained on: a function of yours that "
        "returns a petastorm.cache.CacheBase",
        metavar="MODULE:FUNCTION",
        parse=function_name,
    )

    @property
    def functions(self) -> dict[str, str]:
        """Option → function, of those that are given."""
        return {option: function for option in _NAMES if (function := getattr(self, option))}

    def petastorm_options(
        self, permission: Permission, among: Sequence[str] = tuple(_NAMES)
    ) -> PetastormOptions:
        """Calls the functions of these options."""
        asked = {option: function for option, function in self.functions.items() if option in among}
        if not asked:
            return PetastormOptions()
        compat.install()  # the user's modules import Petastorm
        made = {}
        for option, function in asked.items():
            flag = f"--{option.replace('_', '-')}"
            make = permission.load(function, f"the run's {flag}")
            try:
                made[_NAMES[option]] = value = make()
            except Exception as error:
                raise PetastormError(
                    f"{flag} {function}: the function failed ({type(error).__name__}: {error}); it is "
                    "called without arguments"
                ) from error
            if value is None:
                raise PetastormError(
                    f"{flag} {function}: the function returned nothing; let it return what the Reader "
                    "is to use"
                )
        return PetastormOptions(**made)

    def changed_table(self, table: FeatureTable) -> FeatureTable:
        """The table with the columns that the TransformSpec leaves. PetastormError if nobody knows how many ids one of
        them has."""
        spec = self.petastorm_options(table.permission, ON_EVERY_SPLIT).transform_spec
        if spec is None:
            return table
        fields = reshaped(table.fields, table.schema, spec)
        for field in fields:
            if field.role in ("sparse", "id_list") and field.cardinality is None:
                raise PetastormError(
                    f"--transform-spec {self.transform_spec}: edit_fields names {field.name!r}, a column of ids, and "
                    "its embedding needs to know how many there are. Make ids by --transform, or leave the column out "
                    "of edit_fields: the function may then change ids below the column's size"
                )
        return replace(table, fields=fields)
