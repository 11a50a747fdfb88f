"""The counts of many pieces are added up with work that grows with their number only."""

from tests.product import CountSums


class Counted:
    """Counts of one row, which note how often their rows are looked at."""

    looks = 0

    @property
    def num_rows(self):
        Counted.looks += 1
        return 1


def test_the_rows_of_a_piece_are_looked_at_once_however_many_pieces_came_before():
    Counted.looks = 0
    sums = CountSums(2**20, {})
    for _ in range(100):
        sums._add(0, Counted())
    assert Counted.looks == 100
