"""The policy's network during training: `Student`, in torch and with an optimiser."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sluice.agent.lab.adam import Adam
from sluice.agent.policies.opening.policy import SHAPES

MOMENTS = {f"{kind}.{name}": shape for kind in ("mean", "square") for name, shape in SHAPES.items()}
Arrays = dict[str, np.ndarray]


class Student:
    """The network, made from weights or from the result of `saved`."""

    def __init__(self, arrays: Mapping[str, np.ndarray], count: int = 0) -> None:
        import torch

        self.weights = {
            name: torch.from_numpy(arrays[name].copy()).requires_grad_() for name in SHAPES
        }
        self._adam = Adam(list(self.weights.values()), 0.0)
        self._adam.count = count
        for kind, own in (("mean", self._adam.means), ("square", self._adam.squares)):
            for name, tensor in zip(SHAPES, own, strict=True):
                if f"{kind}.{name}" in arrays:
                    tensor.copy_(torch.from_numpy(arrays[f"{kind}.{name}"]))

    @classmethod
    def fresh(cls, seed: int) -> Student:
        draw, arrays = np.random.default_rng((9, seed)), {}
        for name, shape in SHAPES.items():
            scale = (0.1 if name.startswith(("stage", "pipeline")) else math.sqrt(2)) / math.sqrt(
                shape[-1]
            )
            arrays[name] = (scale * draw.standard_normal(shape) * name.endswith("weight")).astype(
                np.float32
            )
        return cls(arrays)

    def arrays(self) -> Arrays:
        return {name: tensor.detach().numpy().copy() for name, tensor in self.weights.items()}

    def saved(self) -> tuple[Arrays, int]:
        """Returns all that `Student` needs to continue from here."""
        moments = {
            f"{kind}.{name}": tensor.numpy().copy()
            for kind, own in (("mean", self._adam.means), ("square", self._adam.squares))
            for name, tensor in zip(SHAPES, own, strict=True)
        }
        return {**self.arrays(), **moments}, self._adam.count

    def answers(self, stages: Any, pipelines: Any, real: Any) -> tuple[Any, Any, Any]:
        """Returns the same as `sluice.agent.policies.opening.policy.answer`, with gradients."""
        import torch

        def layer(name: str, values: Any) -> Any:
            return torch.nn.functional.linear(
                values, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
            )

        mask = real[..., None].float()
        state = torch.relu(
            layer(
                "see", torch.cat([stages, pipelines[:, None].expand(-1, stages.shape[1], -1)], -1)
            )
        )
        for name in ("hear", "hear_again"):
            state = state * mask
            heard = [
                h.expand_as(state)
                for h in (
                    state.sum(1, keepdim=True) / mask.sum(1, keepdim=True),
                    state.amax(1, keepdim=True),
                )
            ]
            nothing = torch.zeros_like(state[:, :1])
            state = torch.relu(
                layer(
                    name,
                    torch.cat(
                        [
                            state,
                            *heard,
                            torch.cat([nothing, state[:, :-1]], 1),
                            torch.cat([state[:, 1:], nothing], 1),
                        ],
                        -1,
                    ),
                )
            )
        state = state * mask
        of_stage = layer("stage", state)
        return (
            of_stage[..., 0],
            of_stage[..., 1],
            layer("pipeline", torch.cat([state.sum(1) / mask.sum(1), state.amax(1)], -1)),
        )

    def learn(self, loss: Any, rate: float) -> None:
        import torch

        self._adam.rate = rate
        gradients = torch.autograd.grad(loss, self._adam.weights)
        length = torch.sqrt(sum(((g * g).sum() for g in gradients), torch.zeros(())))
        with torch.no_grad():
            self._adam.step([g * min(1.0, 1.0 / float(length + 1e-9)) for g in gradients])
