"""What a trainer takes in one step: `Batch`, in tensors that lie as they are loaded, and by the names of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from sluice.common.extras import install_command
from sluice.ingest.columns import Columns
from sluice.ingest.errors import LoadingError
from sluice.ingest.knobs import nearest

if TYPE_CHECKING:
    import pandas as pd
    from torchrec.datasets.utils import Batch as TorchrecBatch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

TENSORS = ("dense", "values", "lengths", "label", "weight")
"""The fields of a batch that are tensors."""


class BagColumn(NamedTuple):
    """A column of which each row has any number of ids: tensors, or numpy arrays."""

    values: Any
    """The ids of the first row, then of the second."""
    lengths: Any
    """How many of them each row has."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank takes in one step. The tensors are views of memory that is used again once all are gone."""

    dense: torch.Tensor
    """[rows, dense columns] float32, feature by feature underneath."""
    values: torch.Tensor
    """int32, or int64 where a column has more ids: all ids of the first sparse column, then of the second, as
    KeyedJaggedTensor has them."""
    lengths: torch.Tensor
    """[sparse columns × rows] int32: the number of ids of each row. Without bags one tensor for all batches: do not
    write to it."""
    label: torch.Tensor
    """[rows] float32."""
    weight: torch.Tensor
    """[rows] float32: 0 marks a row that only fills the batch."""
    rows: int
    """The number of rows that do not just fill the batch."""
    epoch: int
    step: int
    checksum: int = field(default=0, repr=False)
    """Checksum of one column's ids as read, before any transform: it goes into the order hash."""
    columns: Columns | None = field(default=None, repr=False, compare=False)
    """What the columns are called; None if whoever made the batch did not say."""

    def __len__(self) -> int:
        """The number of rows, with those that only fill the batch."""
        return len(self.dense)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch with its tensors on that device, as frameworks move theirs."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in memory from which a GPU copies without waiting; torch's DataLoader asks for it."""
        return self._moved(torch.Tensor.pin_memory)

    @property
    def names(self) -> tuple[str, ...]:
        """The columns by name: dense ones, sparse ones, the label and the weight."""
        columns = self._named()
        return (*columns.dense, *columns.sparse, columns.label, columns.weight or "weight")

    def __getitem__(self, name: str) -> torch.Tensor | BagColumn:
        """One column: numbers as float32 [rows], ids as int32 or int64 [rows], and as a `BagColumn` ids of
        which a row has any number."""
        columns = self._named()
        if name in columns.dense:
            return self.dense[:, columns.dense.index(name)]
        if name in columns.sparse:
            return next(ids for column, ids in self._ids() if column == name)
        if name == columns.label:
            return self.label
        if name == (columns.weight or "weight"):
            return self.weight
        raise KeyError(f"the batch has no column {name!r}{nearest(name, self.names)}")

    def as_dict(self) -> dict[str, torch.Tensor | BagColumn]:
        """All columns by name, as views of the batch."""
        columns, names = self._named(), self.names
        if names[-1] in names[:-1]:
            raise LoadingError(
                f"column {names[-1]!r} is a feature, and the weights of rows have its name in a dict of "
                "columns; give the feature another name, or take batch[name] and batch.weight"
            )
        return {
            **dict(zip(columns.dense, self.dense.unbind(1), strict=True)),
            **dict(self._ids()),
            columns.label: self.label,
            names[-1]: self.weight,
        }

    def numpy(self) -> dict[str, Any]:
        """All columns by name as numpy arrays, views of the batch; a column of bags is a `BagColumn` of arrays."""
        return {
            name: BagColumn(one.values.numpy(), one.lengths.numpy())
            if isinstance(one, BagColumn)
            else one.numpy()
            for name, one in self.as_dict().items()
        }

    def pandas(self) -> pd.DataFrame:
        """A copy as a frame with a column for each name; a bag is an array in its row."""
        try:
            import pandas as pd
        except ImportError:
            raise LoadingError("batches as frames need pandas: pip install pandas") from None
        return pd.DataFrame(
            {
                name: np.split(one.values, np.cumsum(one.lengths)[:-1])
                if isinstance(one, BagColumn)
                else one
                for name, one in self.numpy().items()
            }
        )

    def kjt(self) -> KeyedJaggedTensor:
        """The ids as TorchRec takes them."""
        try:
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        except ImportError:
            raise LoadingError(
                f"batches for TorchRec need torchrec: {install_command('trainer')}"
            ) from None
        return KeyedJaggedTensor(list(self._named().sparse), self.values, lengths=self.lengths)

    def torchrec(self) -> TorchrecBatch:
        """The batch as TorchRec's own loops take it: `dense_features`, `sparse_features`, `labels`, and no weights."""
        ids = self.kjt()
        from torchrec.datasets.utils import Batch as TorchrecBatch

        return TorchrecBatch(self.dense, ids, self.label)

    def _ids(self) -> Iterator[tuple[str, torch.Tensor | BagColumn]]:
        columns = self._named()
        lengths = self.lengths.view(len(columns.sparse), len(self))
        parts = (
            torch.split(self.values, lengths.sum(1).tolist())
            if columns.bags
            else self.values.view(lengths.shape).unbind()
        )
        for name, values, counts in zip(columns.sparse, parts, lengths, strict=True):
            yield name, BagColumn(values, counts) if name in columns.bags else values

    def _named(self) -> Columns:
        if self.columns is None:
            raise LoadingError("this batch was made without the names of its columns")
        return self.columns

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in TENSORS}
        return replace(self, **moved)


FORMS: dict[str, Callable[[Batch], Any] | None] = {
    "batch": None,
    "dict": Batch.as_dict,
    "kjt": Batch.torchrec,
    "numpy": Batch.numpy,
    "pandas": Batch.pandas,
}
"""The forms in which a loader can give its batches."""
