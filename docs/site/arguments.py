"""An extension of the reference's builder: sentences on arguments become a list. It runs where griffe is installed."""

from __future__ import annotations

from typing import Any

import griffe

from docs.site.argument_list import as_list


class Arguments(griffe.Extension):
    """Applies `as_list` to every function."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = as_list(
                func.docstring.value, {parameter.name for parameter in func.parameters}
            )
