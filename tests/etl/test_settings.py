"""Settings, said once: a dataclass is a command line, a record and a check."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from sluice.common.settings import check, make, parse, read, replaced, setting
from tests.product import UsageError
from tests.raises import MISTAKES, raises


def size(text: str) -> int:
    if not text.endswith("MiB"):
        raise UsageError(f"{text!r} is not a number of bytes")
    return int(text.removesuffix("MiB")) * 2**20


@dataclass(frozen=True, kw_only=True)
class Inner:
    title = "model"
    layers: tuple[int, ...] = setting((8, 4), "sizes", least=1)


@dataclass(frozen=True, kw_only=True)
class Base:
    title = "what"
    data: str = setting(help="a table", metavar="TABLE", positional=True)
    seed: int = setting(0, "decides the order")
    shuffle: bool = setting(True, "rows as they lie", flags=("--no-shuffle",))


@dataclass(frozen=True, kw_only=True)
class Outer(Base):
    title = "work"
    mode: str = setting("create", "how", choices=("create", "append"))
    limit: int | None = setting(None, "memory, 100 % at most", parse=size, metavar="BYTES")
    rate: float = setting(0.5, "how fast", above=0)
    share: float = setting(0.0, "of the rows", least=0, most=1)
    follow: str = setting("", "newer ones", bare="epochs")
    mine: tuple[str, ...] = setting((), "a module", again=True)
    out: Path | None = setting(None, "a folder")
    best: bool = setting(False, "the best one")
    inner: Inner = field(default_factory=Inner)
    ranks: int = 1

    def __post_init__(self) -> None:
        check(self)


def outer(*words: str) -> Outer:
    return parse(Outer, argv=["t", *words], prog="p")


def test_what_is_given_is_told_from_a_default():
    assert read(Outer, argv=["t", "--seed", "0"], prog="p") == {"data": "t", "seed": 0}
    assert outer() == Outer(data="t")


def test_every_kind_of_value_arrives():
    words = (
        "--no-shuffle --mode append --limit 64MiB --rate=2 --share 1 --follow --mine a --mine b "
        "--out o --best --layers 3,2"
    )
    assert outer(*words.split()) == Outer(
        data="t",
        shuffle=False,
        mode="append",
        limit=2**26,
        rate=2.0,
        share=1.0,
        follow="epochs",
        mine=("a", "b"),
        out=Path("o"),
        best=True,
        inner=Inner(layers=(3, 2)),
    )
    assert outer("--follow", "parts").follow == "parts"


def test_words_of_an_option_that_is_given_again_are_added():
    @dataclass(frozen=True, kw_only=True)
    class Inputs:
        input: tuple[str, ...] = setting(help="files", metavar="PATH", several=True)

    assert parse(Inputs, argv=["--input", "a", "b", "--input", "c"], prog="x").input == (
        "a",
        "b",
        "c",
    )


def test_what_is_given_replaces_what_a_run_recorded_and_nothing_else_does():
    recorded = outer("--rate", "3", "--layers", "7")
    given = read(Outer, argv=["u", "--seed", "0"], prog="p")
    assert replaced(recorded, given, ranks=4) == Outer(
        data="u", rate=3.0, ranks=4, inner=Inner(layers=(7,))
    )
    assert make(Outer, given, seed=9).seed == 9
    assert asdict(recorded)["inner"] == {"layers": (7,)}


@pytest.mark.parametrize(
    ("words", "facts"),
    MISTAKES["option"],
)
def test_a_wrong_word_is_one_line_that_says_what_would_do(words, facts):
    with raises(UsageError, *facts) as refused:
        outer(*words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "facts"),
    [
        ({"mode": "apend"}, ("--mode:", "'apend'", "create")),
        ({"seed": 1.5}, ("--seed:", "1.5", "whole number")),
    ],
)
def test_a_record_is_checked_as_a_command_line_is(values, facts):
    with raises(UsageError, *facts):
        Outer(data="t", **values)
