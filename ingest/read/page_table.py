"""Where the pages of a row group are, and how it is cut into pieces that read only their own pages: `PageTable`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sluice.common.native import call_kernel
from sluice.ingest.row_order import SLICE_ROWS

PIECE_ROWS = 4 * SLICE_ROWS
"""The usual most rows of a piece: few enough to be needed at about the same time, and many enough to hide its cost."""

_USUAL_PAGES = 2048
"""There is room for so many pages at first. Much room would make allocators keep more memory."""
_LEAST_PAGE_BYTES = 8
"""No page is smaller than that, as its head already is not."""


class PagesOfPiece(NamedTuple):
    """The pages of one column that have the rows of a piece."""

    places: tuple[tuple[int, int], tuple[int, int]]
    """Where the file has the dictionary, if they need it, and these pages."""
    skip: int
    """The rows of the pages before those of the piece."""
    rows: int
    """The rows of the pages."""


def find_pages(descriptor: int, begin: int, end: int, rows: int) -> npt.NDArray[np.int64]:
    """Returns for each page of a column its first row, where it begins, its bytes without compression, and whether it
    needs the dictionary. The first entry is of the dictionary, if there is one. After the last page comes the end of
    rows and bytes."""
    room, most = _USUAL_PAGES, min(rows, (end - begin) // _LEAST_PAGE_BYTES) + 3
    while True:
        pages = np.empty((room, 4), np.int64)
        count = call_kernel("find_pages", descriptor, begin, end, rows, pages, room)
        if count >= 0:
            return pages[:count].copy()
        if room >= most:
            raise ValueError("the pages of a column are not understood")
        room = min(8 * room, most)


@dataclass(frozen=True)
class PageTable:
    """The pages of some columns of a row group, as `find_pages` returns them."""

    rows: int
    columns: Mapping[str, npt.NDArray[np.int64]]

    def pages_of(self, name: str, first: int, rows: int) -> PagesOfPiece:
        """Returns the pages of a column that have some rows."""
        pages = self.columns[name]
        after, last = np.searchsorted(pages[:, 0], (first + 1, first + rows))
        (row, at), (end_row, end), (_, begin), (_, to) = pages[[after - 1, last, 0, 1], :2].tolist()
        if not pages[after - 1 : last, 3].any():
            to = begin
        return PagesOfPiece(((begin, to), (at, end)), first - row, end_row - row)

    def piece_rows(self, least: int, most_again: float) -> int:
        """Returns the most rows of pieces, at least so many, or all rows. Pieces read and unpack at most so much of the
        row group a second time: dictionaries, and pages in which a piece begins."""
        once = self.taken([0, self.rows]).sum(axis=(0, 1))
        while least < self.rows:
            again = self.taken(self.cuts(least)).sum(axis=(0, 1)) / once
            if again[:2].max() <= 1 + most_again:
                return least
            least *= 2
        return self.rows

    def cuts(self, most: int) -> list[int]:
        """Returns where pieces of at most `most` rows begin, and the end. A cut is where most columns begin a page."""
        starts = [pages[1:-1, 0] for pages in self.columns.values()]
        rows, columns = np.unique(np.concatenate(starts), return_counts=True)
        cuts = [0]
        while self.rows - cuts[-1] > most:
            low, high = np.searchsorted(rows, cuts[-1] + np.array((most // 2, most)), "right")
            best = columns[low:high][::-1]  # of equal ones the last
            cuts.append(int(rows[high - 1 - best.argmax()]) if len(best) else cuts[-1] + most)
        return [*cuts, self.rows]

    def taken(self, cuts: list[int]) -> npt.NDArray[np.int64]:
        """Returns for each column and piece the rows of its pages, their bytes, and those without compression. A
        dictionary counts as bytes in each piece."""
        sizes = []
        for pages in self.columns.values():
            first = np.searchsorted(pages[:, 0], cuts[:-1], "right") - 1
            last = np.searchsorted(pages[:, 0], cuts[1:])
            before = np.cumsum(pages[:, 2:], axis=0) - pages[:, 2:]
            ends = np.column_stack([pages[:, :2], before])
            own = ends[last] - ends[first]
            dictionary = (0, pages[1, 1] - pages[0, 1], pages[0, 2])
            sizes.append(own[:, :3] + (own[:, 3:] > 0) * dictionary)
        return np.array(sizes)
