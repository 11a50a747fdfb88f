"""A device that copies as late as it may: `LateLane`. It needs no accelerator."""

from collections.abc import Callable

import torch

SHAPES = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "is_cuda")),
}
"""What may be asked of a tensor before its numbers are there."""


class Copy:
    """A copy to the device that was asked for."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target, self.source, self.arrived = target, source, False

    def arrive(self) -> None:
        if not self.arrived:
            self.target.copy_(self.source)
            self.arrived = True


class LateTensor(torch.Tensor):
    """A tensor on that device. The copy from the host takes place when somebody first looks at a number in it."""

    copy: Copy

    @classmethod
    def __torch_function__(cls, func, _types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.t:
                return late(args[0].as_subclass(torch.Tensor).t(), args[0].copy)
            if func not in SHAPES:
                args, kwargs = looked_at(args), looked_at(kwargs or {})
            return func(*args, **kwargs or {})


def late(target: torch.Tensor, copy: Copy) -> LateTensor:
    tensor = target.as_subclass(LateTensor)
    tensor.copy = copy
    return tensor


def looked_at(value):
    """The value with ordinary tensors in place of late ones, which arrive now."""
    if isinstance(value, LateTensor):
        value.copy.arrive()
        return value.as_subclass(torch.Tensor)
    if isinstance(value, dict):
        return {key: looked_at(inner) for key, inner in value.items()}
    return type(value)(map(looked_at, value)) if type(value) in (list, tuple) else value


class LateLane:
    """A mark passes when all that was sent before it has arrived. With `hasty`, marks pass at once, so buffers are used
    again too early."""

    def __init__(self, *, hasty: bool = False) -> None:
        self.hasty = hasty
        self.made = 0
        self.copies: list[Copy] = []

    def pinned(self, size: int, kind: torch.dtype) -> torch.Tensor:
        self.made += 1
        return torch.empty(size, dtype=kind)

    def send(self, source: torch.Tensor) -> torch.Tensor:
        self.copies.append(Copy(torch.empty_like(source), source))
        return late(self.copies[-1].target, self.copies[-1])

    def mark(self) -> Callable[[], bool]:
        before = list(self.copies)
        return lambda: self.hasty or all(copy.arrived for copy in before)
