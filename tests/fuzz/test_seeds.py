"""The code draws the first seed of the fuzzers."""

from __future__ import annotations

from tests.fuzz import seeds


def test_each_change_of_product_or_fuzzers_draws_another_seed_and_nothing_else_does(
    tmp_path, monkeypatch
):
    for name in (
        "room/__init__.py",
        "room/inner/part.py",
        "tests/__init__.py",
        "tests/fuzz/case.py",
        "tests/test_room.py",
        "docs/conf.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    monkeypatch.setattr(seeds, "_ROOT", tmp_path)
    found = [seeds.seed_of_code()]
    for name in ("room/__init__.py", "room/inner/part.py", "tests/fuzz/case.py"):
        (tmp_path / name).write_text("a = 2\n")
        found.append(seeds.seed_of_code())
    (tmp_path / "room/inner/part.py").rename(tmp_path / "room/inner/other.py")
    found.append(seeds.seed_of_code())
    assert len(set(found)) == len(found)
    for name in ("tests/__init__.py", "tests/test_room.py", "docs/conf.py"):
        (tmp_path / name).write_text("a = 2\n")
    assert seeds.seed_of_code() == found[-1]
