"""The default, the limits and the spelling of each option stay, until somebody changes them here too."""

import dataclasses
import importlib
import inspect
import tomllib
from pathlib import Path

import pytest

ROOMS = ("etl", "ingest", "agent", "dlrm", "sluice/tools")
OPTIONS = tomllib.loads(Path(__file__).with_name("options.toml").read_text("utf-8"))


def described(field: dataclasses.Field) -> str:
    """What a command line may say: the default, then what the option limits."""
    option = field.metadata["option"]
    default = field.default.name if isinstance(field.default, Path) else repr(field.default)
    default = "required" if field.default is dataclasses.MISSING else default
    spelling = {
        key.name: getattr(option, key.name)
        for key in dataclasses.fields(option)
        if key.name not in ("help", "metavar", "parse")
    }
    return ", ".join(
        [
            default,
            *(
                f"{key} {value}"
                for key, value in spelling.items()
                if value not in (None, (), False)
            ),
        ]
    )


def options_of(module: str) -> dict[str, str]:
    there = importlib.import_module(f"sluice.{module}".replace("sluice.sluice.", "sluice."))
    kinds = [kind for _, kind in inspect.getmembers(there, dataclasses.is_dataclass)]
    return {
        f"{kind.__name__}.{field.name}": described(field)
        for kind in kinds
        if isinstance(kind, type) and kind.__module__ == there.__name__
        for field in dataclasses.fields(kind)
        if "option" in field.metadata and field.name in kind.__annotations__
    }


@pytest.mark.parametrize("module", OPTIONS)
def test_each_option_has_the_default_and_the_limits_that_are_noted(module):
    assert options_of(module) == OPTIONS[module]


def test_no_options_are_left_out(repo):
    files = [path.relative_to(repo) for room in ROOMS for path in (repo / room).rglob("*.py")]
    made = {
        ".".join(file.with_suffix("").parts)
        for file in files
        if file.parts[1] != "lab" and "= setting(" in (repo / file).read_text("utf-8")
    }
    assert made == {*OPTIONS}
