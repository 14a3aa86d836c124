"""What a model policy averages: parameters, buffers and optimizer state, flat in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from horovod_partial.torch.devices import check_device


class ModelBucket:
    """Tensors that travel together, so that one decision covers all of them: a model is never torn.

    They are copied: what is being sent is never what the optimizer writes. Parameters of half precision travel as
    float32, in which their average is exact enough; if one tensor is float64, all travel so.
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
        """Copy the tensors into the flat one."""
        torch._foreach_copy_(self._views, self.tensors)

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the flat tensor into the others."""
        torch._foreach_copy_(self.tensors, self._views)


def averaged_tensors(
    parameters: Sequence[torch.nn.Parameter],
    state: Mapping[Any, dict[str, Any]],
    average: tuple[str, ...],
    named_buffers: Iterable[tuple[str, torch.Tensor]],
) -> list[torch.Tensor]:
    """What `average` names, in an order that is the same on every rank.

    State is what the optimizer keeps for a parameter in the parameter's own shape, such as momentum; counters of steps
    stay each rank's own. A parameter without state on this rank, because it has had no gradient yet, counts with zeros,
    which is what its state begins with.

    Args:
        parameters: that are trained.
        state: of the optimizer.
        average: as in the policy.
        named_buffers: of the model.
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
