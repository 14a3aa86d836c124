"""Packs parameters, buffers and optimizer state into one flat tensor, which a policy of models averages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from horovod_partial.torch.devices import check_device


class ModelBucket:
    """Tensors of a model that travel together, so that all of them belong to the same round.

    The tensors are copied into a flat one, because the optimizer may write them while the copy travels. Half precision
    travels as float32, so that the average is exact enough. If one tensor is float64, all travel as float64. Tensors
    without a floating-point type, on an unsupported device or on several devices raise ValueError.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        device = self.tensors[0].device
        for tensor in self.tensors:
            check_device(tensor.device)
            if not tensor.dtype.is_floating_point:
                raise ValueError(f"a model policy averages floating-point tensors, not {tensor.dtype}")
            if tensor.device != device:
                raise ValueError(f"a model policy needs all tensors on one device, not on {device} and {tensor.device}")
        wide = any(tensor.dtype == torch.float64 for tensor in self.tensors)
        self.flat = torch.zeros(
            sum(t.numel() for t in self.tensors), dtype=torch.float64 if wide else torch.float32, device=device
        )
        parts = torch.split(self.flat, [t.numel() for t in self.tensors])
        self._views = [part.view(t.shape) for part, t in zip(parts, self.tensors, strict=True)]

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the model's tensors into the flat tensor."""
        torch._foreach_copy_(self._views, self.tensors)

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the flat tensor back into the model's tensors."""
        torch._foreach_copy_(self.tensors, self._views)


def averaged_tensors(
    parameters: Sequence[torch.nn.Parameter],
    state: Mapping[Any, dict[str, Any]],
    average: tuple[str, ...],
    named_buffers: Iterable[tuple[str, torch.Tensor]],
) -> list[torch.Tensor]:
    """Return the tensors that a policy of models averages, in the same order on every rank.

    State means tensors that the optimizer keeps in the shape of a parameter, such as momentum. Counters of steps are
    not averaged. If a parameter has had no gradient on this rank, it has no state here. Its state counts as zeros then,
    because state begins with zeros. `average` has some of `"parameters"`, `"buffers"` and `"state"`.
    """
    tensors: list[torch.Tensor] = list(parameters)
    if "buffers" in average:
        tensors += [buffer for _, buffer in named_buffers if buffer.dtype.is_floating_point]
    if "state" in average:
        states: list[dict[str, Any]] = [
            {
                key: value
                for key, value in state.get(parameter, {}).items()
                if key != "step"
                and isinstance(value, torch.Tensor)
                and value.dtype.is_floating_point
                and value.shape == parameter.shape
            }
            for parameter in parameters
        ]
        for key in sorted({key for own in states for key in own}):
            for parameter, own in zip(parameters, states, strict=True):
                tensors.append(own[key] if key in own else torch.zeros_like(parameter))
    return tensors
