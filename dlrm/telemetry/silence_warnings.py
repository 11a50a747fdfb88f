"""Silences warnings that libraries give on every start and that users cannot act on."""

from __future__ import annotations

import logging
import warnings

_WARNINGS = (
    ("`broadcast_buffers` is deprecated", FutureWarning),  # torchrec 1.8 wraps the dense layers so
    # torchrec 1.8, row-wise tables
    ("`torch.distributed.reduce_scatter_tensor` is deprecated", FutureWarning),
    # torchrec 1.8 makes these tensors.
    ("Please use DTensor instead and we are deprecating ShardedTensor", FutureWarning),
    ("`torch.distributed.all_gather_into_tensor` is deprecated", FutureWarning),
    # fbgemm 1.8, a table of which each rank has a copy, on a CPU: it has a gradient, which a test compares.
    (
        "fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel was not registered",
        UserWarning,
    ),
    # The layers over no dense columns
    ("Initializing zero-element tensors is a no-op", UserWarning),
)


def quiet() -> None:
    """Silences these warnings. A program calls it once, before it builds the model."""
    for text, category in _WARNINGS:
        warnings.filterwarnings("ignore", message=text.replace(".", r"\."), category=category)
    # The warning is "caching params will be ignored".
    logging.getLogger("torchrec.distributed.utils").setLevel(logging.ERROR)
    # The warning is "is_fx_tracing will return true for …".
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
