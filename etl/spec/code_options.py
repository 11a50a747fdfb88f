"""The options with which a user allows code of a spec, in all programs: `--allow-code` and `--spec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.common.errors import UsageError
from sluice.common.settings import setting
from sluice.etl.spec.permission import MODULE_NAME, Permission, find_modules_here


def _module(text: str) -> str:
    if not MODULE_NAME.fullmatch(text):
        raise UsageError(f"{text!r} is not the name of a module; write for instance mine.features")
    find_modules_here()
    return text


def _transform(text: str) -> str:
    from sluice.etl.spec.table_transform import short_transforms
    from sluice.etl.spec.toml_keys import SpecError

    try:
        short_transforms((text,))
    except SpecError as error:
        raise UsageError(str(error).partition(": ")[2]) from None
    find_modules_here()
    return text


def _spec(path: str) -> str:
    _functions(path)
    return path


def _functions(path: str) -> frozenset[str]:
    """Returns the functions that a user's spec names. Imports nothing."""
    from sluice.etl.spec.spec import Spec

    try:
        return Spec.parse(Path(path).read_text("utf-8"), path).functions
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: the spec cannot be read ({error})") from None


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """The code that a table's spec may import. Every program that reads a table or a run folder has these options. No
    run records them."""

    title = "code that the table's spec names"
    allow_code: tuple[str, ...] = setting(
        (),
        "let the table's spec import and run functions of this module; may be repeated, and is not "
        "remembered (default: none; built-in operators need no permission)",
        metavar="MODULE",
        parse=_module,
        again=True,
    )
    own_spec: str = setting(
        "",
        "your own spec: the functions that it names may be imported and run. For a table or files of another program, "
        "it also names the columns and splits (`sluice guess` writes it)",
        flags=("--spec",),
        metavar="FILE",
        parse=_spec,
    )

    @property
    def permission(self) -> Permission:
        return self.permission_with(())

    def permission_with(self, transforms: Sequence[str]) -> Permission:
        """Returns the permission of these options, with the functions of --transform."""
        from sluice.etl.spec.table_transform import short_transforms

        named = frozenset(transform.function for transform in short_transforms(transforms))
        own = _functions(self.own_spec) if self.own_spec else frozenset()
        return Permission(frozenset(self.allow_code), named | own)


@dataclass(frozen=True, kw_only=True)
class TransformOptions:
    """Functions that change the columns. They may be imported."""

    title = "input"
    transforms: tuple[str, ...] = setting(
        (),
        "a function to apply after the table's own transforms; it takes a dict of numpy arrays, of all columns "
        "or of the named ones; an output that is no column becomes a dense column, or, with =SIZE, a column of ids "
        "below SIZE; @10s at the end: a batch may take ten seconds, in a process; may be repeated",
        flags=("--transform",),
        metavar="MODULE:FUNCTION[:IN,…>OUT,…][@10s]",
        parse=_transform,
        again=True,
    )
