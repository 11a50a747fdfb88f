"""Computes a model in two threads, each with half of the rows: `run_in_halves`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from torch import Tensor


def run_in_halves(
    second: Executor,
    run: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    parameters: Iterable[Tensor],
) -> Tensor:
    """Returns `run(*inputs)`. The thread of `second` computes the second half. Each row of the result must depend only
    on `parameters` and on this row of the inputs. The gradients of the halves are always added in the same order, so
    two runs are equal."""
    if len(inputs[0]) < 2:
        return run(*inputs)

    def compute_both(compute: Callable[[Any], Any], *halves: Any) -> tuple[Any, Any]:
        other = second.submit(compute, halves[1])
        return compute(halves[0]), other.result()

    result: Tensor = _Halves.apply(  # type: ignore[no-untyped-call]
        compute_both, run, torch.is_grad_enabled(), len(inputs), *inputs, *parameters
    )
    return result


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        compute_both: Callable[..., tuple[Any, Any]],
        run: Callable[..., Tensor],
        trains: bool,
        count: int,
        *tensors: Tensor,
    ) -> Tensor:
        inputs, ctx.parameters, ctx.compute_both = tensors[:count], tensors[count:], compute_both
        middle = len(inputs[0]) // 2

        def compute(rows: slice) -> tuple[list[Tensor], Tensor]:
            half = [t[rows].detach().requires_grad_(trains and t.requires_grad) for t in inputs]
            with torch.set_grad_enabled(trains):
                return half, run(*half)

        ctx.halves = compute_both(compute, slice(middle), slice(middle, None))
        return torch.cat([logits.detach() for _, logits in ctx.halves])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        def compute(number: int) -> tuple[Tensor, ...]:
            inputs, logits = ctx.halves[number]
            wanted = [*(t for t in inputs if t.requires_grad), *ctx.parameters]
            return torch.autograd.grad(logits, wanted, parts[number])

        parts = torch.split(gradient, [len(logits) for _, logits in ctx.halves])
        pairs = zip(*ctx.compute_both(compute, 0, 1), strict=True)
        of_inputs = [torch.cat(next(pairs)) if t.requires_grad else None for t in ctx.halves[0][0]]
        return None, None, None, None, *of_inputs, *(first + second for first, second in pairs)
