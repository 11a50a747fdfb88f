"""The pictures of docs/benchmarks.md show what docs/pictures/tables.md says."""

import re

import pytest

from benchmarks import pictures
from benchmarks.pictures import PICTURES, Picture, Series, drawn, values

TABLES = """# Tables

## 2030-01-02 · Later
| a | rate |
|---|---|
| one | 3 |

## 2030-01-01 · First
Words.

| who | rate | waiting |
|---|---|---|
| **ours** | **1,234** | 54 %, **.2 %** |
| `theirs` | 5.5 k; 6 M | 22 %, .1 % |

| other | share |
|---|---|
| x | 1 |
"""
FIRST = Picture(
    file="first",
    title="Waiting",
    entry="2030-01-01 · First",
    table="rate",
    unit="{} %",
    series=(Series(name="before", column="waiting"), Series(name="after", column="waiting", nth=1)),
)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.file)
def test_the_files_are_what_would_be_drawn_today(picture):
    path = pictures.FOLDER / f"{picture.file}.svg"
    assert path.read_text() == drawn(picture, pictures.TABLES.read_text()), (
        "run python -m benchmarks.pictures"
    )
    assert (
        f"(pictures/{picture.file}.svg)" in (pictures.ROOT / "docs" / "benchmarks.md").read_text()
    )


def test_the_figures_are_those_of_the_table_and_of_no_other_entry():
    assert values(FIRST, TABLES) == [("ours", [54.0, 0.2]), ("theirs", [22.0, 0.1])]
    picture = drawn(FIRST, TABLES)
    assert re.findall(r">([^<]*%[^<]*)<", picture) == ["54 %, 0.2 %", "22 %, 0.1 %"]
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="8"', picture)]
    assert widths[0] == max(widths)
    assert widths[2] / widths[0] == pytest.approx(22 / 54, abs=0.01)
