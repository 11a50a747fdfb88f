"""The rows that a trainer takes in one step: `Batch`, with tensors for all columns and access by column name."""

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
    """A column of bags, in which each row has any number of ids. Holds tensors or numpy arrays."""

    values: Any
    """The ids of the first row, then of the second, and so on."""
    lengths: Any
    """The number of ids of each row."""


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """The rows that one rank takes in one step. The tensors are views of memory that is reused once all are gone."""

    dense: torch.Tensor
    """[rows, dense columns] float32. In memory, each feature is contiguous."""
    values: torch.Tensor
    """All ids of the first sparse column, then of the second, as in KeyedJaggedTensor. int32, or int64 if a column
    needs it. Histories of numbers come last, as the bits of their float32."""
    lengths: torch.Tensor
    """[sparse columns × rows] int32: the number of ids of each row. Do not write to it: without bags, all batches share
    one tensor."""
    label: torch.Tensor
    """[rows] float32."""
    weight: torch.Tensor
    """[rows] float32: 0 marks a padding row."""
    rows: int
    """The number of rows without padding."""
    epoch: int
    step: int
    checksum: int = 0
    """A checksum of one column's ids before any transform. It is part of the order hash."""
    columns: Columns | None = field(default=None, compare=False)
    """The columns and their names. None if the batch was made without them."""

    def __repr__(self) -> str:
        tensors = ((name, getattr(self, name)) for name in TENSORS)
        parts = [
            f"{self.rows:,} rows, epoch {self.epoch}, step {self.step}",
            ", ".join(f"{n} {list(t.shape)} {str(t.dtype)[6:]}" for n, t in tensors),
            *([] if self.columns is None else [self.columns.described]),
        ]
        return f"Batch({'; '.join(parts)})"

    def __len__(self) -> int:
        """The number of rows, including padding."""
        return len(self.dense)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Returns the batch with its tensors on `device`. Frameworks call this to move batches."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Returns the batch in pinned memory, for asynchronous copies to a GPU. torch's DataLoader calls this."""
        return self._moved(torch.Tensor.pin_memory)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns: dense, sparse, label and weight."""
        columns = self._named()
        return (*columns.dense, *columns.sparse, columns.label, columns.weight or "weight")

    def __getitem__(self, name: str) -> torch.Tensor | BagColumn:
        """Returns one column: numbers as float32 [rows], ids as int32 or int64 [rows], and bags as a `BagColumn`."""
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
        """Returns all columns by name, as views of the batch."""
        columns, names = self._named(), self.names
        if names[-1] in names[:-1]:
            raise LoadingError(
                f"column {names[-1]!r} is a feature, but the weights of rows have the same name in a dict of "
                "columns; rename the feature, or use batch[name] and batch.weight"
            )
        return {
            **dict(zip(columns.dense, self.dense.unbind(1), strict=True)),
            **dict(self._ids()),
            columns.label: self.label,
            names[-1]: self.weight,
        }

    def numpy(self) -> dict[str, Any]:
        """Returns all columns by name as numpy arrays, which are views. A column of bags is a `BagColumn` of arrays."""
        return {
            name: BagColumn(column.values.numpy(), column.lengths.numpy())
            if isinstance(column, BagColumn)
            else column.numpy()
            for name, column in self.as_dict().items()
        }

    def pandas(self) -> pd.DataFrame:
        """Returns a copy as a DataFrame. A bag is an array in its row."""
        try:
            import pandas as pd
        except ImportError:
            raise LoadingError("batches as frames need pandas: pip install pandas") from None
        return pd.DataFrame(
            {
                name: np.split(column.values, np.cumsum(column.lengths)[:-1])
                if isinstance(column, BagColumn)
                else column
                for name, column in self.numpy().items()
            }
        )

    def kjt(self) -> KeyedJaggedTensor:
        """Returns the ids as TorchRec's KeyedJaggedTensor."""
        try:
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        except ImportError:
            raise LoadingError(
                f"batches for TorchRec need torchrec: {install_command('trainer')}"
            ) from None
        columns = self._named()
        lengths = self.lengths[: len(columns.ids) * len(self)]
        values = self.values[: int(lengths.sum())] if columns.numbers else self.values
        return KeyedJaggedTensor(list(columns.ids), values, lengths=lengths)

    def torchrec(self) -> TorchrecBatch:
        """Returns the batch for TorchRec's own loops: `dense_features`, `sparse_features` and `labels`, no weights."""
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
            if name in columns.numbers:
                yield name, BagColumn(values.to(torch.int32).view(torch.float32), counts)
                continue
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
