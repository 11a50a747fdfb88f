import json

import pytest

from sluice.common.suggest import BY_WAY
from sluice.ingest.knobs import KnobError, Knobs, Limits, parse_bytes
from tests.raises import assert_names, raises

LIMITS = Limits(
    workers={"decode": (1, 8), "transform": (1, 4), "second": (1, 4)},
    backends={"transform": ("thread", "process")},
    prefetch_bytes=(2**20, 2**30),
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("64MiB", 64 * 2**20),
        ("3KiB", 3 * 2**10),
        ("1.5 GiB", 3 * 2**29),
        ("10MB", 10**7),
        ("4096", 4096),
        ("7b", 7),
    ],
)
def test_bytes_are_read_as_written(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 furlong", "1e9", "0x10"])
def test_what_is_no_number_of_bytes_is_refused_with_an_example(text):
    with raises(KnobError, "64MiB"):
        parse_bytes(text)


def test_a_command_line_changes_what_it_names_and_nothing_else():
    base = Knobs(workers={"decode": 1})
    knobs = base.parse("decode=4, transform=2,transform.backend=process,prefetch_bytes=64MiB")
    assert dict(knobs.workers) == {"decode": 4, "transform": 2}
    assert dict(knobs.backend) == {"transform": "process"}
    assert knobs.prefetch_bytes == 64 * 2**20
    assert knobs.read_ahead_bytes == base.read_ahead_bytes
    assert base == Knobs(workers={"decode": 1}), "the base was changed"


@pytest.mark.parametrize("text", ["read=4", "collate=1"])
def test_a_stage_that_only_0_2_had_is_refused_by_name(text):
    with raises(KnobError, repr(text.partition("=")[0]), BY_WAY):
        LIMITS.check(Knobs(workers={"decode": 1}).parse(text))


def test_what_is_in_flight_may_be_given_in_bytes():
    knobs = Knobs(workers={"fetch": 1})
    for text, count in (("fetch=65MiB", 9), ("fetch=3", 3)):
        assert knobs.parse(text, 8 * 2**20).workers == {"fetch": count}


@pytest.mark.parametrize(
    "text",
    [
        "decode",
        "decode=",
        "decode=-1",
        "decode=1.5",
        "decode=many",
        "decode=0",
        "decode=99999",
        "transform.backend=gpu",
        "second.fused=maybe",
        "prefetch_bytes=lots",
    ],
)
def test_nonsense_on_the_command_line_is_refused(text):
    with pytest.raises(KnobError):
        Knobs().parse(text)


@pytest.mark.parametrize(
    "values",
    [
        {"workers": {"decode": True}},
        {"workers": {"decode": 2.0}},
        {"backend": {"decode": "fork"}},
        {"prefetch_bytes": 0},
        {"read_ahead_bytes": 1.5},
        {"read_ahead_bytes": float("nan")},
    ],
)
def test_knobs_that_cannot_be_are_refused(values):
    with pytest.raises(KnobError):
        Knobs(**values)


def test_json_and_back():
    knobs = Knobs(
        workers={"decode": 3},
        backend={"decode": "thread"},
        prefetch_bytes=5,
    )
    assert Knobs.from_dict(json.loads(json.dumps(knobs.to_dict()))) == knobs
    with pytest.raises(KnobError, match="did you mean 'prefetch_bytes'"):
        Knobs.from_dict({"prefetch_byte": 5})


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("decdoe=2", ("'decdoe'", "'decode'")),
        ("decode=9", ("'decode'", 9, "1 to 8")),
        ("decode.backend=process", ("backend", "'decode'", "'process'")),
        ("prefetch_bytes=1", ("prefetch_bytes", 1)),
        ("prefetch_bytes=2GiB", ("prefetch_bytes", 2**31)),
    ],
)
def test_limits_name_what_is_outside(text, facts):
    with raises(KnobError, *facts):
        LIMITS.check(Knobs().parse(text))


def test_clamp_gives_the_nearest_inside_and_that_passes():
    wild = Knobs(
        workers={"decode": 99, "gone": 3},
        backend={"decode": "process", "transform": "process"},
        prefetch_bytes=2**40,
    )
    tame = LIMITS.clamp(wild)
    LIMITS.check(tame)
    assert dict(tame.workers) == {"decode": 8, "transform": 1, "second": 1}
    assert dict(tame.backend) == {"transform": "process"}
    assert tame.prefetch_bytes == 2**30
    assert LIMITS.clamp(tame) == tame
    several = Limits(workers={"decode": (2, 8)})
    assert several.clamp(Knobs(workers={"decode": 1})).workers["decode"] == 2


def test_fused_stages_of_0_3_get_workers_of_their_own_with_one_line():
    base = Knobs(workers={"transform": 2, "second": 3}, backend={"transform": "process"})
    old = base.to_dict() | {"fused": ["second"]}
    for read in (
        lambda: base.parse("transform.fused=no,second.fused=yes"),
        lambda: Knobs.from_dict(old),
        lambda: Knobs(workers=base.workers, backend=base.backend, fused="second"),
    ):
        with pytest.warns(FutureWarning, match="'second' has workers of its own") as lines:
            assert read() == base
        assert len(lines) == 1
    assert Knobs.from_dict(old | {"fused": ["shuffle"]}) == base, "its own line says so"
    assert_names(str(base), "transform=2(process)", "second=3")
    assert base.total_workers == 5


def test_stages_of_0_3_that_are_gone_are_left_out_with_one_line():
    for take in (LIMITS.check, LIMITS.clamp):
        with pytest.warns(FutureWarning, match="shuffle or batch any more, as decode") as lines:
            taken = take(Knobs(workers={"decode": 2, "transform": 1, "shuffle": 2, "batch": 3}))
        assert (len(lines), taken.workers["decode"]) == (1, 2)
        assert "batch" not in taken.workers
    named = Limits(workers={"batch": (1, 8)})
    assert named.check(Knobs(workers={"batch": 3})).workers == {"batch": 3}, "a function's name"
