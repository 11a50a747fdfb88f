"""The options by which a user allows code that a spec names: `--allow-code` and `--spec`, the same in all programs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sluice.etl.spec.permission import MODULE_NAME, Permission
from sluice.etl.spec.spec import Spec
from sluice.etl.spec.toml_keys import SpecError
from sluice.etl.spec.transforms import short_transforms


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds the options. Every program that reads a table or a run folder has them, so that one command line fits
    all."""
    parser.add_argument("--allow-code", metavar="MODULE", type=_module, action="append", default=argparse.SUPPRESS,
                        help="let the table's spec name functions of this module to be imported and run; may be given "
                        "again, and is not remembered (default: none; built-in operators need no leave)")
    parser.add_argument("--spec", metavar="FILE", dest="own_spec", type=_spec, default=argparse.SUPPRESS,
                        help="a spec of your own: the functions that it names may be imported and run")


def add_transforms(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds `--transform`, by which a user names functions, and allows them."""
    parser.add_argument("--transform", metavar="MODULE:FUNCTION[:IN,…>OUT,…]", dest="transforms", type=_transform,
                        action="append", default=argparse.SUPPRESS,
                        help="what else is done to the columns, after the table's own transforms: a function over a "
                        "dict of numpy arrays, of all columns or of those named; an output that is no column becomes "
                        "a dense one, or, with =SIZE, one of so many ids; may be given again")


def given(options: argparse.Namespace) -> Permission:
    """Returns the permission that these options give."""
    own = getattr(options, "own_spec", None)
    functions = frozenset(one.function for one in short_transforms(getattr(options, "transforms", ())))
    return Permission(frozenset(getattr(options, "allow_code", ())), functions | (_functions(own) if own else set()))


def _module(text: str) -> str:
    if not MODULE_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no module's name; write for instance mine.features")
    return text


def _transform(text: str) -> str:
    try:
        short_transforms((text,))
    except SpecError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None
    if os.getcwd() not in sys.path:  # as `python -m` finds modules
        sys.path.insert(0, os.getcwd())
    return text


def _spec(path: str) -> str:
    _functions(path)
    return path


def _functions(path: str) -> frozenset[str]:
    """The functions that a user's spec names; nothing is imported yet."""
    try:
        return Spec.parse(Path(path).read_text("utf-8"), path).functions
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: the spec cannot be read ({error})") from None


def words(options: argparse.Namespace) -> list[str]:
    """Spells the same options as arguments of another program's command line."""
    found = [word for module in getattr(options, "allow_code", ()) for word in ("--allow-code", module)]
    return [*found, *(("--spec", options.own_spec) if "own_spec" in options else ())]
