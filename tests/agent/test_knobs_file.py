"""Knobs as a file: there and back, and what is refused."""

from __future__ import annotations

import pytest

from sluice.agent.runtime import knobs_file
from sluice.ingest.knobs import KnobError, Knobs, Limits
from tests.raises import raises

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
    ("text", "facts"),
    [
        ("[workers]\nread = 65\n", [65, "1 to 64"]),
        ("[workers]\nraed = 2\n", ["'read'"]),
        ("[backend]\n'my stage' = 'procces'\n", ["'process'"]),
        ("fused = ['nex']\n", ["'next'"]),
        ("worker = 3\n", ["'workers'"]),
        ("workers = 3\n", ["table of stages"]),
        ("[workers\n", ["TOML"]),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_name(tmp_path, text, facts):
    path = tmp_path / "k.toml"
    path.write_text(text)
    with raises(KnobError, path, *facts):
        knobs_file.load(path, LIMITS)


def test_a_file_that_cannot_be_read_or_written_is_refused(tmp_path):
    with raises(KnobError, tmp_path / "none.toml", "cannot be read"):
        knobs_file.load(tmp_path / "none.toml")
    with raises(KnobError, "cannot be written"):
        knobs_file.save(tmp_path / "none" / "k.toml", Knobs())
    (tmp_path / "file").write_text("")
    with raises(KnobError, "cannot be written"):
        knobs_file.save(tmp_path / "file" / "k.toml", Knobs())


def test_a_file_name_is_distinguished_from_settings(tmp_path):
    (tmp_path / "k").write_text("")
    assert knobs_file.is_file_name("best.toml")
    assert knobs_file.is_file_name(str(tmp_path / "k"))
    assert not knobs_file.is_file_name("read=4,prefetch_bytes=1MiB")
    assert not knobs_file.is_file_name("")
