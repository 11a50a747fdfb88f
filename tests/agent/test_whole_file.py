"""A file is replaced as a whole or not at all: `replace_file`."""

from __future__ import annotations

import os

import pytest

from sluice.agent.whole_file import replace_file


def test_a_file_or_a_link_is_replaced_and_no_draft_stays(tmp_path):
    kept, path = tmp_path / "kept", tmp_path / "config.json"
    kept.write_text("mine")
    path.symlink_to(kept)
    replace_file(path, "new ½")
    assert (path.read_text(), path.is_symlink(), kept.read_text()) == ("new ½", False, "mine")
    replace_file(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert sorted(tmp_path.iterdir()) == [path, kept]


def fail(*_: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_file_that_cannot_be_replaced_stays_and_no_draft_does(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_draft_that_was_left_stops_no_later_writer(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        patched.setattr(os, "unlink", fail)
        with pytest.raises(OSError, match="Input/output"):
            replace_file(path, "old")
    [draft] = tmp_path.iterdir()
    replace_file(path, "new")
    assert path.read_text() == "new"
    assert sorted(tmp_path.iterdir()) == sorted([path, draft])
