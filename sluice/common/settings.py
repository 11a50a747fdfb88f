"""Settings in one place: a frozen dataclass whose fields are a program's options, a run's record, and what is checked.

    @dataclass(frozen=True, kw_only=True)
    class EvaluationSettings:
        title = "evaluation"
        evals: int = setting(1, "evaluations an epoch", metavar="N", least=1)

`read(EvaluationSettings, argv=…)` returns only the options on the command line. `make` fills in the defaults, and
`replaced` the settings that an older run recorded. A class may contain others, and may derive from others. `title` is
the heading of its options in --help.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from types import UnionType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from sluice.common.errors import UsageError
from sluice.common.suggest import left, meant

T = TypeVar("T")
LOG_FORMATS = ("text", "json")
Given = dict[str, Any]
"""Field → value, of the options that a command line gives."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, but an error is a UsageError of one line, which suggests what may have been meant."""

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Returns the given options. A misspelt one is reported before one that is missing because of it."""
        known = [name for action in self._actions for name in action.option_strings]
        until = list(words).index("--") if "--" in words else len(words)
        unknown = [
            name
            for name in (word.partition("=")[0] for word in words[:until])
            if name.startswith("--") and name not in known
        ]
        if unknown:
            self.error(
                "; ".join(
                    f"no option {name!r}{left(f'{self.prog} {name}') or meant(name, known)}"
                    for name in unknown
                )
            )
        return vars(self.parse_args(words))

    def error(self, message: str) -> NoReturn:
        _, separator, words = message.partition("unrecognized arguments: ")
        files = separator and all(map(os.path.exists, words.split()))
        hint = (
            "one is taken: put a pattern of files in quotes, so that the shell leaves it whole; "
            if files
            else ""
        )
        raise UsageError(f"{message.removeprefix('argument ')} ({hint}see --help)")


@dataclass(frozen=True, kw_only=True)
class Option:
    """How a field is written on a command line, and which values it may have."""

    help: str
    flags: tuple[str, ...] = ()
    """Its names, if not --name-of-the-field."""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    above: float | None = None
    """Bounds of a number, or of each of several."""
    parse: Callable[[str], Any] | None = None
    """Makes a value of a word, where its type does not say how."""
    bare: str | None = None
    """The value of the option if it is given without one."""
    several: bool = False
    """Whether several words follow the option."""
    again: bool = False
    """Whether the option is given anew for each of several values."""
    positional: bool = False
    later: bool = False
    """Whether a command line may lack it although it has no default, as something else may know it."""

    def problem(self, value: Any, kind: Any) -> str:
        """Returns what is wrong with a value of this kind. Empty: nothing."""
        if self.choices and value not in self.choices:
            names = list(filter(None, self.choices))
            return f"{value!r} is none of {', '.join(names)}{left(str(value)) or meant(str(value), names)}"
        if kind in (int, float) and not (
            isinstance(value, (int, kind))
            and not isinstance(value, bool)
            and abs(value) < float("inf")
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
        ):
            return f"{value!r} is not {self.kind(kind)}"
        return ""

    def kind(self, kind: type) -> str:
        """Returns which values it takes, in words."""
        words = {int: "a whole number", float: "a number"}.get(kind, "what it takes")
        if self.above == 0:
            return "a positive number"
        if self.most is not None:
            return f"{words} from {self.least} to {self.most}"
        return words if self.least is None else f"{words} of {self.least} or more"


def setting(default: Any = MISSING, help: str = "", **how: Any) -> Any:
    """Returns a field of a settings class, with the properties of its `Option`. Without a default it is required."""
    return dataclasses.field(default=default, metadata={"option": Option(help=help, **how)})


def read(
    *parts: type,
    argv: Sequence[str],
    prog: str,
    description: str | None = None,
    epilog: str | None = None,
) -> Given:
    """Reads a command line with the options of these classes. Raises a UsageError for a wrong one."""
    parser = ArgumentParser(
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog=prog,
        description=inspect.cleandoc(description or ""),
        epilog=epilog,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(  # for --help: `program.run` takes it from the command line
        "--log-format",
        choices=LOG_FORMATS,
        help="json: each message on standard error is an object of one line (default: text)",
    )
    groups: dict[str, Any] = {"options": parser}  # argparse's own title
    for title, field, hint in (option for part in parts for option in _options(part)):
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add(groups[title], field, hint)
    given = parser.read(argv)
    return given | {name: (*value,) for name, value in given.items() if isinstance(value, list)}


def parse(
    kind: type[T],
    argv: Sequence[str],
    prog: str,
    *,
    description: str | None = None,
    epilog: str | None = None,
) -> T:
    """Returns the settings of this class from a command line, with defaults for the rest."""
    return make(kind, read(kind, argv=argv, prog=prog, description=description, epilog=epilog))


def make(kind: type[T], given: Given, **known: Any) -> T:
    """Returns the settings of this class from given values, known values, and defaults, in this order."""
    parts = {
        name: make(hint, given)
        for name, hint in get_type_hints(kind).items()
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and name not in known
    }
    return kind(**(_said(kind, given) | parts | known))


def replaced(settings: T, given: Given, **known: Any) -> T:
    """Returns these settings with the given and the known values replaced."""
    parts = {
        f.name: replaced(part, given)
        for f in dataclasses.fields(settings)  # type: ignore[arg-type]
        if dataclasses.is_dataclass(part := getattr(settings, f.name))
    }
    return dataclasses.replace(settings, **(_said(settings, given) | parts | known))  # type: ignore[type-var]


def check(settings: Any, error: type[UsageError] = UsageError) -> None:
    """Raises an error that names the first setting whose value is not among its choices or not within its limits."""
    hints = get_type_hints(type(settings))
    for f in dataclasses.fields(settings):
        option, value = f.metadata.get("option"), getattr(settings, f.name)
        if option is None or value is None:
            continue
        kind, many = _kind(hints[f.name])
        for item in value if many else (value,):
            if problem := option.problem(item, kind):
                raise error(f"{_flags(f)[0]}: {problem}")


def _said(settings: Any, given: Given) -> Given:
    """Returns the given values of the fields that are options."""
    names = [f.name for f in dataclasses.fields(settings) if "option" in f.metadata]
    return {name: given[name] for name in names if name in given}


def _options(kind: type) -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yields each option of a class, its base classes and the classes that it contains, with its title and type."""
    hints, fields = get_type_hints(kind), {f.name: f for f in dataclasses.fields(kind)}
    for base in (*kind.__mro__[1:], kind):
        for name in vars(base).get("__annotations__", {}):
            if (field := fields.pop(name, None)) is None:
                continue
            if dataclasses.is_dataclass(hints[name]):
                yield from _options(hints[name])
            elif "option" in field.metadata:
                yield getattr(base, "title", "options"), field, hints[name]


def _kind(hint: Any) -> tuple[type, bool]:
    """Returns the type of one value, and whether there are several."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    return (get_args(hint)[0], True) if get_origin(hint) is tuple else (hint, False)


def _flags(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    option = field.metadata["option"]
    return (
        (field.name,)
        if option.positional
        else option.flags or (f"--{field.name.replace('_', '-')}",)
    )


def _add(group: Any, field: dataclasses.Field[Any], hint: Any) -> None:
    """Adds a field to a parser's group."""
    option: Option = field.metadata["option"]
    kind, many = _kind(hint)
    how: dict[str, Any] = {} if option.positional else {"dest": field.name}
    required = field.default is MISSING and not option.later
    if kind is bool:
        how["action"] = "store_false" if field.default else "store_true"
    else:
        how["type"] = _reader(option, kind, many and not (option.several or option.again))
        how["metavar"] = option.metavar or (
            f"{{{','.join(filter(None, option.choices))}}}"
            if option.choices
            else {int: "N", float: "NUMBER"}.get(kind)
        )
    if option.again:
        how["action"] = "append"
    if option.bare is not None:
        how |= {"nargs": "?", "const": option.bare}
    elif option.several:
        how["nargs"] = "+" if required or not option.positional else "*"
        if not option.positional:
            # Otherwise an option that is given again would replace its earlier values.
            how["action"] = "extend"
    elif option.positional and not required:
        how["nargs"] = "?"
    if required and not option.positional:
        how["required"] = True
    # The help has the default if that says something to a person.
    text, default = option.help, field.default
    if not (
        default is MISSING
        or isinstance(default, bool)
        or default in (None, "", ())
        or "(default" in text
    ):
        if isinstance(default, float):
            shown = f"{default:g}"
        elif isinstance(default, tuple):
            shown = ",".join(map(str, default))
        else:
            shown = str(default)
        text = f"{text} (default: {shown})".lstrip()
    group.add_argument(*_flags(field), help=text.replace("%", "%%"), **how)


def _reader(option: Option, kind: type, commas: bool) -> Callable[[str], Any]:
    """Returns what makes a value of an option's word."""

    def one(text: str) -> Any:
        try:
            value = (option.parse or kind)(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {option.kind(kind)}") from None
        if problem := option.problem(value, kind):
            raise argparse.ArgumentTypeError(problem)
        return value

    return (lambda text: tuple(one(part) for part in text.split(",") if part)) if commas else one
