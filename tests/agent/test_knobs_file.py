"""Knobs as a file: there and back, and what is refused."""

from __future__ import annotations

import pytest

from sluice.agent.runtime import knobs_file
from sluice.ingest.knobs import KnobError, Knobs, Limits

LIMITS = Limits(
    workers={"read": (1, 64), "my stage": (1, 4), "next": (1, 4)},
    backends={"my stage": ("thread", "process")},
    fusable={"next": "my stage"},
)


def test_there_and_back_with_a_note(tmp_path):
    knobs = Knobs(
        workers={"read": 12, "my stage": 3}, backend={"my stage": "process"}, prefetch_bytes=2**24
    )
    path = knobs_file.save(tmp_path / "best.toml", knobs, notes=["1.2 M rows/s\non 2 cores"])
    assert knobs_file.load(path, LIMITS) == knobs
    text = path.read_text()
    assert text.startswith("# 1.2 M rows/s\n# on 2 cores\n")
    assert "prefetch_bytes = 16777216  # 16 MiB" in text
    assert "read = 12" in text
    knobs_file.save(path, knobs.with_workers(read=1))
    assert knobs_file.load(path).workers["read"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["best.toml"]


def test_stages_that_are_fused_are_listed(tmp_path):
    knobs = Knobs(workers={"my stage": 3, "next": 1}, fused={"next"})
    path = knobs_file.save(tmp_path / "best.toml", knobs)
    assert 'fused = ["next"]' in path.read_text()
    assert knobs_file.load(path, LIMITS) == knobs


def test_sizes_may_have_units_and_what_is_left_out_is_as_usual(tmp_path):
    path = tmp_path / "k.toml"
    path.write_text('read_ahead_bytes = "1GiB"\n')
    assert knobs_file.load(path) == Knobs(read_ahead_bytes=2**30)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[workers]\nread = 65\n", "65 is outside 1 to 64"),
        ("[workers]\nraed = 2\n", "did you mean 'read'"),
        ("[workers]\nread = 1.5\n", "1.5 is not a whole number"),
        ("[backend]\n'my stage' = 'procces'\n", "did you mean 'process'"),
        ("[backend]\nread = 'process'\n", "not among"),
        ("fused = ['nex']\n", "did you mean 'next'"),
        ("fused = 'next'\n", "no list of stages"),
        ("worker = 3\n", "did you mean 'workers'"),
        ("workers = 3\n", "no table of stages"),
        ("prefetch_bytes = true\n", "not a number of bytes"),
        ("[workers\n", "is not TOML"),
        ("\x00", "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(tmp_path, text, word):
    path = tmp_path / "k.toml"
    path.write_text(text)
    with pytest.raises(KnobError, match=r"k\.toml") as error:
        knobs_file.load(path, LIMITS)
    assert word in str(error.value)


def test_no_file_and_no_place_for_one(tmp_path):
    with pytest.raises(KnobError, match="cannot be read"):
        knobs_file.load(tmp_path / "none.toml")
    with pytest.raises(KnobError, match="cannot be written"):
        knobs_file.save(tmp_path / "none" / "k.toml", Knobs())
    (tmp_path / "file").write_text("")
    with pytest.raises(KnobError, match="cannot be written"):
        knobs_file.save(tmp_path / "file" / "k.toml", Knobs())


def test_a_file_name_is_told_from_settings(tmp_path):
    (tmp_path / "k").write_text("")
    assert knobs_file.is_file_name("best.toml")
    assert knobs_file.is_file_name(str(tmp_path / "k"))
    assert not knobs_file.is_file_name("read=4,prefetch_bytes=1MiB")
    assert not knobs_file.is_file_name("")
