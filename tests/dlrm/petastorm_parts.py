"""Functions that a command line of the tests names: each makes what Petastorm's Reader is to use. As in a module of a
user, nothing here mends today's Arrow for Petastorm."""

from __future__ import annotations

from typing import Any

import numpy as np
from petastorm.cache import CacheBase
from petastorm.predicates import in_lambda
from petastorm.selectors import RowGroupSelectorBase
from petastorm.transform import TransformSpec


def even_rows() -> Any:
    return in_lambda(["I1"], lambda number: number % 2 == 0)


def odd_rows() -> Any:
    return in_lambda(["I1"], lambda number: number % 2 == 1)


class FirstGroups(RowGroupSelectorBase):
    def get_index_names(self) -> list[str]:
        return []

    def select_row_groups(self, index_dict: Any) -> set[int]:
        return {0, 1}


class Kept(CacheBase):
    def get(self, key: str, fill_cache_func: Any) -> Any:
        return fill_cache_func()


def halved_and_sum() -> Any:
    """Halves I2 in place, adds a column, and leaves I3 out."""

    def change(frame: Any) -> Any:
        return frame.assign(I2=frame["I2"] / 2, both=frame["I2"] + frame["I3"]).drop(columns="I3")

    return TransformSpec(
        change, edit_fields=[("both", np.float32, (), False)], removed_fields=["I3"]
    )


def edited_ids() -> Any:
    return TransformSpec(lambda frame: frame, edit_fields=[("C1", np.int32, (), False)])


def text() -> str:
    return "I1 > 3"
