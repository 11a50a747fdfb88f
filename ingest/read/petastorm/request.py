"""The command line's options for Petastorm's Reader, each of which names a user's function: `PetastormRequest`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sluice.common.settings import setting
from sluice.etl.spec.permission import function_name

if TYPE_CHECKING:
    from sluice.etl.spec.permission import Permission
    from sluice.etl.table.table import FeatureTable
    from sluice.ingest.read.petastorm.options import PetastormOptions

_NAMES = {
    "transform_spec": "transform_spec",
    "predicate": "predicate",
    "rowgroup_selector": "rowgroup_selector",
    "rowgroup_cache": "cache",
}
"""Each option, and its name in `PetastormOptions`."""
ON_EVERY_SPLIT = ("transform_spec",)
"""The options that also apply when a model is evaluated. The others choose the rows to train on."""


def _names_function(returns: str) -> Any:
    """Returns an option that names a user's function, which returns this."""
    text = f"a function of yours that returns {returns}"
    return setting("", text, metavar="MODULE:FUNCTION", parse=function_name)


@dataclass(frozen=True, kw_only=True)
class PetastormRequest:
    """Each option names a function, which each rank calls without arguments. Naming a function on the command line
    also allows it."""

    title = "Petastorm's Reader"
    transform_spec: str = _names_function(
        "a TransformSpec; it changes each row group as a DataFrame, also when the model is evaluated"
    )
    predicate: str = _names_function("a predicate; only the rows that it keeps are trained on")
    rowgroup_selector: str = _names_function(
        "a selector without stored indexes; only the row groups that it selects are trained on"
    )
    rowgroup_cache: str = _names_function(
        "a petastorm.cache.CacheBase; it keeps the decoded row groups that are trained on"
    )

    @property
    def functions(self) -> dict[str, str]:
        """The function of each option that is given."""
        return {option: function for option in _NAMES if (function := getattr(self, option))}

    def petastorm_options(
        self, permission: Permission, among: Sequence[str] = tuple(_NAMES)
    ) -> PetastormOptions:
        """Calls the functions of these options and returns what they made."""
        from sluice.ingest.read.petastorm import compat
        from sluice.ingest.read.petastorm.options import PetastormError, PetastormOptions

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
                    f"{flag} {function}: the function returned None; it must return what the Reader "
                    "is to use"
                )
        return PetastormOptions(**made)

    def changed_table(self, table: FeatureTable) -> FeatureTable:
        """Returns the table with its columns after the TransformSpec. PetastormError if the number of ids of one of
        them is unknown."""
        from sluice.ingest.read.petastorm.options import PetastormError, fields_after

        spec = self.petastorm_options(table.permission, ON_EVERY_SPLIT).transform_spec
        if spec is None:
            return table
        fields = fields_after(table.fields, table.schema, spec)
        for field in fields:
            if field.role in ("sparse", "id_list") and field.cardinality is None:
                raise PetastormError(
                    f"--transform-spec {self.transform_spec}: edit_fields names {field.name!r}, a column of ids whose "
                    "number is then unknown to its embedding. Make ids by --transform, or leave the column out of "
                    "edit_fields: the function may then still give ids below the column's size"
                )
        return replace(table, fields=fields)
